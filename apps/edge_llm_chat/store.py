"""Store: conversations in an SQLite database that only its owner can read; or in memory, for chats that leave nothing behind.

Used from one thread, the event loop's: each call takes a millisecond or so. Other processes may use the same file.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_llm import paths
from edge_llm.errors import StorageError
from edge_llm.messages import Role
from edge_llm_chat.conversation import Conversation, Turn
from edge_llm_chat.migrations import MIGRATIONS
from edge_llm_chat.search import clause, like
from edge_llm_chat.turn_json import read_details, write_details

NAME = "chats.sqlite3"
_BUSY_S = 2.0
MOST_FOUND = 200
"""conversations that a list shows at once"""


@dataclass(frozen=True, slots=True)
class Summary:
    """A conversation as a list shows it."""

    id: int
    title: str
    updated: float
    turns: int
    pinned: bool
    tags: tuple[str, ...]
    excerpt: str = ""
    """text around what was searched for"""


class Store:
    """Raises `StorageError` for a file that cannot be opened, read or written."""

    def __init__(self, path: Path | None) -> None:
        """`path` None keeps everything in memory."""
        self.path = path
        with _storage(path):
            if path is not None:
                paths.private_dir(path.parent)
                _create(path)
            self._db = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    @classmethod
    def open(cls, *, private: bool = False) -> Store:
        """The user's own: in the data folder, or nowhere."""
        return cls(None if private else paths.data_dir() / "chats" / NAME)

    def _prepare(self) -> None:
        # what is deleted is overwritten, and no temporary table goes to disk
        for pragma in ("secure_delete=ON", "temp_store=MEMORY", "foreign_keys=ON", "synchronous=NORMAL"):
            self._db.execute(f"PRAGMA {pragma}")
        if self.path is not None:
            self._db.execute("PRAGMA journal_mode=WAL")
        seen = self._db.execute("PRAGMA user_version").fetchone()[0]
        if seen > len(MIGRATIONS):
            raise StorageError(
                f"{self.path} was written by a newer edge_llm", hint="update edge_llm, or chat with --private"
            )
        if seen < len(MIGRATIONS):
            self._migrate()

    def _migrate(self) -> None:
        """Do the steps that are missing, all or none; another process may have done them meanwhile."""
        with self._transaction():
            for number in range(self._db.execute("PRAGMA user_version").fetchone()[0], len(MIGRATIONS)):
                for statement in _statements(MIGRATIONS[number]):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={number + 1}")

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    # --- one conversation ---

    def save(self, conversation: Conversation, *, touch: bool = True) -> None:
        """Write the conversation without its turns; a new one gets its id. One that holds nothing is not written.

        Without `touch` it keeps its place among the others.
        """
        if conversation.id is None and not conversation.turns:
            return
        now = time.time()
        values = (
            conversation.title,
            conversation.system,
            conversation.model,
            json.dumps(conversation.parameters),
            int(conversation.pinned),
        )
        with self._transaction():
            if conversation.id is None:
                statement = (
                    "INSERT INTO conversation (title, system, model, parameters, pinned, updated, created)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)"
                )
                conversation.id = self._db.execute(statement, (*values, now, now)).lastrowid
            else:
                statement = (
                    "UPDATE conversation SET title=?, system=?, model=?, parameters=?, pinned=?,"
                    " updated=coalesce(?, updated) WHERE id=?"
                )
                self._db.execute(statement, (*values, now if touch else None, conversation.id))
            self._db.execute("DELETE FROM tag WHERE conversation=?", (conversation.id,))
            rows = [(conversation.id, name) for name in dict.fromkeys(conversation.tags)]
            self._db.executemany("INSERT INTO tag VALUES (?, ?)", rows)

    def save_turn(self, conversation: Conversation, turn: Turn) -> None:
        """Write one turn, and which turns are shown; the conversation too if it is new."""
        self.save(conversation)
        row = (conversation.id, turn.id, turn.parent, turn.role, turn.content, write_details(turn), turn.created)
        with self._transaction():
            found = self._db.execute("SELECT created FROM turn WHERE conversation=? AND id=?", row[:2]).fetchone()
            if found is not None and found[0] != turn.created:
                raise StorageError("another program has changed this chat meanwhile", hint="open it again: Ctrl+O")
            self._db.execute(
                "INSERT INTO turn (conversation, id, parent, shown, role, content, details, created)"
                " VALUES (?, ?, ?, 0, ?, ?, ?, ?) ON CONFLICT (conversation, id) DO UPDATE SET"
                " content=excluded.content, details=excluded.details",
                row,
            )
            self._write_shown(conversation)

    def save_shown(self, conversation: Conversation) -> None:
        """Write which turns are shown."""
        if conversation.id is not None:
            with self._transaction():
                self._write_shown(conversation)

    def _write_shown(self, conversation: Conversation) -> None:
        self._db.execute("UPDATE turn SET shown=0 WHERE conversation=?", (conversation.id,))
        rows = [(conversation.id, turn) for turn in conversation.shown.values()]
        self._db.executemany("UPDATE turn SET shown=1 WHERE conversation=? AND id=?", rows)

    def remove_turns(self, conversation: Conversation, turns: list[int]) -> None:
        """Delete turns, beyond recovery."""
        if conversation.id is None:
            return
        with self._transaction():
            rows = [(conversation.id, turn) for turn in turns]
            self._db.executemany("DELETE FROM turn WHERE conversation=? AND id=?", rows)
            self._write_shown(conversation)
        self._wipe()

    def load(self, conversation: int) -> Conversation:
        """Raises `StorageError` if it is not there."""
        with _storage(self.path):
            row = self._db.execute(
                "SELECT title, system, model, parameters, pinned FROM conversation WHERE id=?", (conversation,)
            ).fetchone()
            if row is None:
                raise StorageError(f"there is no conversation {conversation}")
            tags = self._db.execute("SELECT name FROM tag WHERE conversation=? ORDER BY name", (conversation,))
            loaded = Conversation(
                conversation,
                title=row[0],
                system=row[1],
                model=row[2],
                parameters=_numbers(row[3]),
                pinned=bool(row[4]),
                tags=tuple(name for (name,) in tags),
            )
            for turn, shown in self._turns(conversation):
                loaded.turns[turn.id] = turn
                if shown:
                    loaded.shown[turn.parent] = turn.id
        return loaded

    def _turns(self, conversation: int) -> Iterator[tuple[Turn, bool]]:
        rows = self._db.execute(
            "SELECT id, parent, role, content, details, created, shown FROM turn WHERE conversation=? ORDER BY id",
            (conversation,),
        )
        for turn, parent, role, content, details, created, shown in rows:
            yield Turn(turn, parent, Role(role), content, created=created, **read_details(details)), bool(shown)

    def delete(self, conversation: int) -> None:
        """Delete a conversation, beyond recovery."""
        with self._transaction():
            self._db.execute("DELETE FROM turn WHERE conversation=?", (conversation,))
            self._db.execute("DELETE FROM conversation WHERE id=?", (conversation,))
        self._wipe()

    def _wipe(self) -> None:
        """The search index keeps deleted words until its parts are merged, and the log until it is written back."""
        with _storage(self.path):
            self._db.execute("INSERT INTO turn_text (turn_text) VALUES ('optimize')")
            if self.path is not None:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # --- lists ---

    def last(self) -> int | None:
        """The conversation that was changed last."""
        with _storage(self.path):
            row = self._db.execute("SELECT id FROM conversation ORDER BY updated DESC, id DESC LIMIT 1").fetchone()
        return None if row is None else int(row[0])

    def find(self, words: str = "") -> list[Summary]:
        """Conversations whose title, tags (#tag) or text hold all `words`, pinned and latest first."""
        wanted = words.split()
        if not wanted:
            return self._summaries("", ())
        clauses, values = [], []
        for word in wanted:
            condition, parameters = clause(word)
            clauses.append(condition)
            values += parameters
        found = self._summaries("WHERE " + " AND ".join(clauses), tuple(values))
        return [self._with_excerpt(summary, wanted) for summary in found]

    def _summaries(self, where: str, values: tuple[str, ...]) -> list[Summary]:
        with _storage(self.path):
            rows = self._db.execute(
                "SELECT id, title, updated, (SELECT count(*) FROM turn WHERE conversation=c.id), pinned,"
                " (SELECT group_concat(name, char(10)) FROM tag WHERE conversation=c.id)"
                f" FROM conversation c {where} ORDER BY pinned DESC, updated DESC, id DESC LIMIT {MOST_FOUND}",
                values,
            ).fetchall()
        return [
            Summary(
                row[0],
                row[1],
                row[2],
                row[3],
                bool(row[4]),
                tuple(sorted((row[5] or "").split("\n"))) if row[5] else (),
            )
            for row in rows
        ]

    def _with_excerpt(self, summary: Summary, words: list[str]) -> Summary:
        texts = [word for word in words if not word.startswith("#")]
        if not texts:
            return summary
        with _storage(self.path):
            row = self._db.execute(
                "SELECT content FROM turn WHERE conversation=? AND content LIKE ? ESCAPE '\\' ORDER BY id LIMIT 1",
                (summary.id, like(texts[0])),
            ).fetchone()
        if row is None:
            return summary
        flat = " ".join(row[0].split())
        at = max(flat.lower().find(texts[0].lower()), 0)
        start = flat.rfind(" ", 0, max(at - 16, 0)) + 1  # at the beginning of a word
        return Summary(
            *(summary.id, summary.title, summary.updated, summary.turns, summary.pinned, summary.tags),
            excerpt=("…" if start else "") + flat[start : at + 80],
        )

    # --- what belongs to no conversation ---

    def setting(self, name: str) -> str | None:
        """What the program was told to remember."""
        with _storage(self.path):
            row = self._db.execute("SELECT value FROM setting WHERE name=?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def set_setting(self, name: str, value: str) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (name, value))

    def prompts(self) -> dict[str, str]:
        """The library of system prompts, by name."""
        with _storage(self.path):
            return dict(self._db.execute("SELECT name, text FROM prompt ORDER BY name").fetchall())

    def save_prompt(self, name: str, text: str) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO prompt VALUES (?, ?)", (name, text))

    def delete_prompt(self, name: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM prompt WHERE name=?", (name,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _storage(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; `executescript` would end the transaction that they belong to."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            if statement.strip(" \n;"):
                yield statement
            statement = ""


def _numbers(text: str) -> dict[str, float | int]:
    values = json.loads(text)
    return {str(name): value for name, value in values.items() if isinstance(value, int | float)}


def _create(path: Path) -> None:
    """The file, readable by its owner only from the first moment; its log and index get the same rights."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600))
    os.chmod(path, 0o600)


@contextmanager
def _storage(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the conversations in {path or 'memory'} cannot be used: {error}",
            hint="chat with --private, or move the file away",
        ) from None
