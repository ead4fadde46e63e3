"""Connection: uvicorn's HTTP/1.1 protocol with the deadlines that it lacks.

A client that sends no whole head within `head_timeout_s`, or takes nothing for `send_timeout_s`, loses its connection: slow
clients hold a file descriptor each, and there are not many.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_llm_server.settings import ServerSettings

MAX_HEAD_BYTES = 32 << 10


def protocol_class(settings: ServerSettings) -> type[H11Protocol]:
    """The protocol for connections to a server of these settings."""

    class Connection(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _send_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                transport.abort()
                return
            self._await_head()

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
            cycle = self.cycle
            self._head_timer = self.loop.call_later(settings.head_timeout_s, self._give_up_unless_after, cycle)

        def _give_up_unless_after(self, cycle: Any) -> None:
            if self.cycle is cycle:  # no request has begun since
                self.transport.abort()

    return Connection
