"""Database: the SQLite file of the conversations, which only its owner can read; or one in memory."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_llm import paths
from edge_llm.errors import StorageError
from edge_llm_chat.migrations import MIGRATIONS

_BUSY_S = 2.0


class Database:
    """Opened, and brought to today's form. Raises `StorageError` for a file that cannot be opened, read or written."""

    def __init__(self, path: Path | None) -> None:
        """`path` None keeps everything in memory."""
        self.path = path
        with self._storage():
            if path is not None:
                paths.private_dir(path.parent)
                _create(path)
            self._db = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

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

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._storage():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _storage(self) -> Iterator[None]:
        """What goes wrong inside is a `StorageError`."""
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"the conversations in {self.path or 'memory'} cannot be used: {error}",
                hint="chat with --private, or move the file away",
            ) from None

    def _wipe(self) -> None:
        """The search index keeps deleted words until its parts are merged, and the log until it is written back."""
        with self._storage():
            self._db.execute("INSERT INTO turn_text (turn_text) VALUES ('optimize')")
            if self.path is not None:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; `executescript` would end the transaction that they belong to."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            if statement.strip(" \n;"):
                yield statement
            statement = ""


def _create(path: Path) -> None:
    """The file, readable by its owner only from the first moment; its log and index get the same rights."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600))
    with suppress(OSError):  # not every file system has rights
        os.chmod(path, 0o600)
