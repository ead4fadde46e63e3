"""Store: conversations in an SQLite database that only its owner can read; or in memory, for chats that leave nothing behind.

Used from one thread, the event loop's: each call takes a millisecond or so. Other processes may use the same file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from edge_llm import paths
from edge_llm.errors import StorageError
from edge_llm.messages import Role
from edge_llm_chat.conversation import Conversation, Turn
from edge_llm_chat.database import Database
from edge_llm_chat.summaries import Summary, find
from edge_llm_chat.turn_json import read_details, write_details

NAME = "chats.sqlite3"
_LATEST = 50
"""answers that tell how fast models are here"""


class Store(Database):
    """Raises `StorageError` for a file that cannot be opened, read or written."""

    @classmethod
    def open(cls, *, private: bool = False) -> Store:
        """The user's own: in the data folder, or nowhere."""
        return cls(None if private else paths.data_dir() / "chats" / NAME)

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
        with self._storage():
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

    # --- lists ---

    def last(self) -> int | None:
        """The conversation that was changed last."""
        with self._storage():
            row = self._db.execute("SELECT id FROM conversation ORDER BY updated DESC, id DESC LIMIT 1").fetchone()
        return None if row is None else int(row[0])

    def find(self, words: str = "") -> list[Summary]:
        """Conversations whose title, tags (#tag) or text hold all `words`, pinned and latest first."""
        with self._storage():
            return find(self._db, words.split())

    def speeds(self) -> dict[str, float]:
        """Tokens a second of the models that gave the latest answers, by name, the latest first."""
        with self._storage():
            rows = self._db.execute(
                "SELECT json_extract(details, '$.facts.model'), json_extract(details, '$.facts.tokens_per_s') FROM turn"
                f" WHERE role='assistant' ORDER BY created DESC LIMIT {_LATEST}"
            ).fetchall()
        speeds: dict[str, float] = {}
        for model, speed in rows:
            if model and speed:
                speeds.setdefault(model, float(speed))
        return speeds

    # --- what belongs to no conversation ---

    def setting(self, name: str) -> str | None:
        """What the program was told to remember."""
        with self._storage():
            row = self._db.execute("SELECT value FROM setting WHERE name=?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def set_setting(self, name: str, value: str) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (name, value))

    def prompts(self) -> dict[str, str]:
        """The library of system prompts, by name."""
        with self._storage():
            return dict(self._db.execute("SELECT name, text FROM prompt ORDER BY name").fetchall())

    def save_prompt(self, name: str, text: str) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO prompt VALUES (?, ?)", (name, text))

    def delete_prompt(self, name: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM prompt WHERE name=?", (name,))


def _numbers(text: str) -> dict[str, float | int]:
    values = json.loads(text)
    return {str(name): value for name, value in values.items() if isinstance(value, int | float)}
