"""PrefixStore: blocks of conversations in files that outlive the process.

One file a block (block_file.py), in a folder that only its owner can open. Losing a file costs a prompt's reading, and a
wrong byte would cost the answer: so nothing is synced to the disk, and everything is checked before it is used. Files
appear by a rename, whole or not at all, and are read into memory of our own. Several processes share the folder: those
who read need no lock, those who write or evict take turns.

What goes wrong is counted and never raised. After a failed write nothing is written for a while.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_llm import paths
from edge_llm.cache.block_file import BlockFormat, BlockName
from edge_llm.cache.block_folder import Usage, delete, locked, read_file, sweep, write_file
from edge_llm.cache.blocks import Block, child_key

QUEUED_BLOCKS = 16
"""blocks that may wait to be written"""
PAUSE_S = 30.0
"""after a write that failed"""
_CLOSE_S = 5.0
_AGE_STEP_NS = 1_000_000  # a conversation's later blocks count as older, so that no block outlives its parent


@dataclass(slots=True)
class StoreCounts:
    """What happened to the files of one process."""

    written: int = 0
    dropped: int = 0
    """blocks that were not written: too many at once, or no disk to write to"""
    damaged: int = 0
    """files that were not what they should be; they are deleted"""
    failed: int = 0
    """calls to the system that failed"""


class PrefixStore:
    """The BlockStore of one engine. `read` and `write` are for its thread; a thread of the store's own does the writing."""

    def __init__(
        self, folder: Path, form: BlockFormat, *, budget: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`budget` bounds the bytes of all files in the folder, which is created. Raises `StorageError`."""
        paths.private_dir(paths.private_dir(folder.parent) / folder.name)
        self.fingerprint = form.fingerprint
        self.counts = StoreCounts()
        self._folder, self._form, self._budget, self._clock = folder, form, budget, clock
        self._paused_until = -1.0
        self._queue: queue.Queue[Block | Sequence[bytes] | None] = queue.Queue(QUEUED_BLOCKS)
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        return not self._queue.full() and self._clock() >= self._paused_until

    def write(self, block: Block) -> None:
        self._enqueue(block)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._enqueue(keys)

    def read(self, parent: bytes, ids: Sequence[int]) -> Block | None:
        return self._read(BlockName(child_key(parent, ids), True), parent)

    def read_rest(self, parent: bytes) -> Block | None:
        return self._read(BlockName(parent, False), parent)

    def close(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # the disk does not answer
                self._queue.put(None, timeout=_CLOSE_S)
                self._thread.join(_CLOSE_S)
            self._thread = None

    # --- the writer's thread ---

    def _enqueue(self, item: Block | Sequence[bytes]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="edge-llm prefix writer", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.counts.dropped += 1

    def _run(self) -> None:
        while True:
            items = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while items[-1] is not None:
                    items.append(self._queue.get_nowait())
            blocks = [item for item in items if isinstance(item, Block)]
            if blocks:
                self._write_all(blocks)
            for item in items:
                if item is not None and not isinstance(item, Block):
                    self._touch(item)
            if items[-1] is None:
                return

    def _write_all(self, blocks: list[Block]) -> None:
        if self._clock() < self._paused_until:
            self.counts.dropped += len(blocks)
            return
        left = len(blocks)
        try:
            with locked(self._folder):
                sweep(self._folder)
                usage = Usage.of(self._folder)
                for block in blocks:
                    self._write_one(block, usage)
                    left -= 1
        except (OSError, MemoryError):
            self.counts.failed += 1
            self.counts.dropped += left
            self._paused_until = self._clock() + PAUSE_S

    def _write_one(self, block: Block, usage: Usage) -> None:
        path = self._folder / str(BlockName.of(block))
        if block.whole and path.exists():
            return
        if not block.whole:  # a shorter end of the same conversation must not hide a longer one
            kept = self.read_rest(block.parent)
            if kept is not None and kept.ids[: len(block.ids)] == block.ids:
                return
        usage.make_room(self._form.size, self._budget)
        write_file(path, self._form.encode(block))
        self.counts.written += 1

    def _touch(self, keys: Sequence[bytes]) -> None:
        now = time.time_ns()
        for depth, key in enumerate(keys):
            with contextlib.suppress(OSError):  # it was evicted
                when = now - depth * _AGE_STEP_NS
                os.utime(self._folder / str(BlockName(key, True)), ns=(when, when))

    # --- reading ---

    def _read(self, name: BlockName, parent: bytes) -> Block | None:
        path = self._folder / str(name)
        try:
            data = read_file(path, self._form.size)
        except FileNotFoundError:
            return None
        except (OSError, MemoryError):
            self.counts.failed += 1
            return None
        block = self._form.decode(data, parent)
        if block is None or BlockName.of(block) != name:
            self.counts.damaged += 1
            delete(path)
            return None
        return block
