"""Channel: values to and from another process over a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from itertools import groupby
from queue import Empty, SimpleQueue
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
        self._outgoing: SimpleQueue[Any] = SimpleQueue()  # whose put may interrupt itself
        self._reader = FrameReader()
        self._much = False
        self._writer = threading.Thread(target=self._write, name="edge-llm channel", daemon=True)
        self._writer.start()

    def send(self, value: object) -> None:
        """Write a value, or a whole frame as bytes, soon. Lost if nobody reads any more."""
        self._outgoing.put(value)

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
        self._outgoing.put(None)
        self._writer.join()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Drop what was not written, and end both directions. The thread that receives does this."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which wakes the writer if it is in the middle of something
        self._outgoing.put(None)
        self._writer.join()
        self.socket.close()

    def _write(self) -> None:
        try:
            while waiting := self._waiting():
                # frames that are ready, and between them runs of values
                for is_frame, run in groupby(waiting, key=lambda item: isinstance(item, bytes)):
                    items = list(run)
                    self.socket.sendall(b"".join(items) if is_frame else frame(items))
        except OSError:
            return  # nobody reads
        except BaseException:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # better no answer than half of one
            raise

    def _waiting(self) -> list[Any]:
        """What is to be written now, waiting for something; nothing at the end."""
        items = [self._outgoing.get()]
        with contextlib.suppress(Empty):
            while items[-1] is not None and len(items) < _MOST_VALUES:
                items.append(self._outgoing.get_nowait())
        if items[-1] is None:
            self._outgoing.put(items.pop())  # for the next call
        return items
