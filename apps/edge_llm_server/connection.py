"""Connection: uvicorn's HTTP/1.1 protocol with the deadlines that it lacks.

A client that sends no whole head within `head_timeout_s`, or takes nothing for `send_timeout_s`, loses its connection: slow
clients hold a file descriptor each, and there are not many. Where they are too many, a new one takes the place of the one that
has asked for nothing for the longest time.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_llm_server.settings import ServerSettings

MAX_HEAD_BYTES = 32 << 10
_UNSENT_BYTES = 64 << 10
_UNWRITTEN_BYTES = 16 << 10
"""of a reply, in the kernel and here: with more, it would take long to see that a client has stopped reading"""


def protocol_class(settings: ServerSettings) -> type[H11Protocol]:
    """The protocol for connections to a server of these settings."""

    class Connection(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _send_timer: asyncio.TimerHandle | None = None
        _ended = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_BYTES)
            transport.set_write_buffer_limits(_UNWRITTEN_BYTES)
            self._await_head()
            if len(self.connections) > settings.max_connections:
                self._make_room()

        def _make_room(self) -> None:
            """Ends the connection that has waited longest for a head; this one, if no other waits."""
            all_connections: Any = self.connections
            open_ones = [one for one in all_connections if not one._ended]
            if len(open_ones) > settings.max_connections:
                idle = [one for one in open_ones if one.cycle is one._cycle_before]
                min(idle, key=lambda one: one._waits_since)._abort()

        def _abort(self) -> None:
            self._ended = True
            self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head_timer, self._send_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            self._await_head()  # first: what was pipelined may begin within the call
            super().on_response_complete()

        def pause_writing(self) -> None:
            self._send_timer = self.loop.call_later(settings.send_timeout_s, self.transport.abort)
            super().pause_writing()

        def resume_writing(self) -> None:
            if self._send_timer is not None:
                self._send_timer.cancel()
            super().resume_writing()

        def _await_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
            self._cycle_before, self._waits_since = self.cycle, self.loop.time()
            self._head_timer = self.loop.call_later(settings.head_timeout_s, self._give_up_unless_after, self.cycle)

        def _give_up_unless_after(self, cycle: Any) -> None:
            if self.cycle is cycle:  # no request has begun since
                self._abort()

    return Connection
