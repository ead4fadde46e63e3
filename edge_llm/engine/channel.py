"""Channel: values to and from another process over a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from queue import SimpleQueue
from typing import Any

from edge_llm.engine.wire import FrameReader, frame

_RECEIVED_BYTES = 1 << 18
_MUCH_BYTES = 1 << 20
_MOST_VALUES = 256
"""values of one frame, so that its size stays far below what a frame may hold"""


class Channel:
    """Sending never waits: a thread of its own writes, and what has come up meanwhile goes out in one frame.

    One thread receives; any may send, finalizers too.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Takes the connected socket over."""
        self.socket = connection
        self._waiting: deque[Any] = deque()
        """what is to be written, in order: values, frames as bytes, None at the end; taken by whoever holds the lock"""
        self._wakes: SimpleQueue[None] = SimpleQueue()  # whose put may interrupt itself
        self._writing = threading.Lock()
        self._reader = FrameReader()
        self._much = False
        self._writer = threading.Thread(target=self._write, name="edge-llm channel", daemon=True)
        self._writer.start()

    def send(self, value: object) -> None:
        """Write a value, or a whole frame as bytes, soon. Lost if nobody reads any more."""
        self._waiting.append(value)
        self._wakes.put(None)

    def send_now(self, values: Sequence[object]) -> None:
        """As `send` of each, but what the connection takes without waiting is written by this thread: no other has to wake
        up for it. Raises `WireError` for what cannot be written."""
        if len(values) > _MOST_VALUES or not self._writing.acquire(blocking=False):
            for value in values:
                self.send(value)
            return
        try:
            data = frame(values)
            if self._waiting:
                self.send(data)
            elif rest := data[self._taken(data) :]:
                self._waiting.appendleft(rest)  # before what others have sent meanwhile
                self._wakes.put(None)
        finally:
            self._writing.release()

    def _taken(self, data: bytes) -> int:
        """Bytes that were written without waiting; all of them if nobody reads."""
        try:
            return self.socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def receive(self) -> list[Any]:
        """The next values, waiting for them; none once the other side has ended. Raises `WireError` for bytes that are no
        values."""
        while True:
            try:
                data = self.socket.recv(_RECEIVED_BYTES)
            except OSError:
                return []
            if not data:
                return []
            if values := self._reader.feed(data):
                return values
            self._much = self._much or self._reader.buffered > _MUCH_BYTES

    def received_much(self) -> bool:
        """Whether a frame of more than a megabyte has come since the last call: it leaves holes in the C library's memory."""
        much, self._much = self._much, False
        return much

    def finish(self) -> None:
        """Write what was sent so far, then tell the other side that no more comes."""
        self.send(None)
        self._writer.join()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Drop what was not written, and end both directions. The thread that receives does this."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which wakes the writer if it is in the middle of something
        self.send(None)
        self._writer.join()
        self.socket.close()

    def _write(self) -> None:
        try:
            more = True
            while more:
                self._wakes.get()
                with self._writing:
                    more = self._write_waiting()
        except OSError:
            return  # nobody reads
        except BaseException:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # better no answer than half of one
            raise

    def _write_waiting(self) -> bool:
        """Write what waits; False at the end."""
        while self._waiting:
            items = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_VALUES))]
            ended = None in items
            # frames that are ready, and between them runs of values
            for is_frame, run in groupby(items[: items.index(None)] if ended else items, key=_is_frame):
                some = list(run)
                self.socket.sendall(b"".join(some) if is_frame else frame(some))
            if ended:
                return False
        return True


def _is_frame(item: object) -> bool:
    return isinstance(item, bytes)
