"""Connection: uvicorn's HTTP/1.1 protocol with the deadlines that it lacks.

A client that sends no whole head within `head_timeout_s`, or takes nothing for `send_timeout_s`, loses its connection: slow
clients hold a file descriptor each, and there are not many. Where they are too many, a new one takes the place of the one that
has asked for nothing for the longest time. What lies unread in its socket counts as asked: after a burst it is a whole request,
to be answered or refused in words.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_llm_server.settings import ServerSettings

MAX_HEAD_BYTES = 32 << 10
_RESERVE = 1.5
"""times as many connections as are meant to be there: for a burst of them that have all asked for something"""
_UNSENT_BYTES = 64 << 10
_UNWRITTEN_BYTES = 16 << 10
"""of a reply, in the kernel and here: with more, it would take long to see that a client has stopped reading"""


def _readable(descriptors: Iterable[int]) -> set[int]:
    """Those in which something lies."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(0)}


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
            """Ends the connection that has waited longest for a head, if there is one; else this one, beyond a reserve."""
            all_connections: Any = self.connections
            open_ones = [one for one in all_connections if not one._ended]
            if len(open_ones) <= settings.max_connections:
                return
            waiting = {one.transport.get_extra_info("socket").fileno(): one for one in open_ones if one._waits}
            idle = [waiting[number] for number in waiting.keys() - _readable(waiting)]
            if idle:
                min(idle, key=lambda one: one._waits_since)._abort()
            elif len(open_ones) > settings.max_connections * _RESERVE:
                self._abort()

        @property
        def _waits(self) -> bool:
            """For a head."""
            return self.cycle is self._cycle_before

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
