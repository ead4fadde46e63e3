"""Connections: what becomes of those that say nothing, so that nobody is kept out by them."""

from __future__ import annotations

import asyncio

from aiohttp import web

SILENT_S = 10.0
"""for the head of a connection's first request"""
MOST_SILENT = 64


class Connections:
    """Makes the protocol of each connection. One that has not asked anything in time ends, and of too many such the oldest."""

    def __init__(self, server: web.Server, *, silent_s: float = SILENT_S) -> None:
        self._server, self._silent_s = server, silent_s
        self._silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    def __call__(self) -> asyncio.BaseProtocol:
        while len(self._silent) >= MOST_SILENT:
            self._drop(next(iter(self._silent)))
        protocol = self._server()
        timer = asyncio.get_running_loop().call_later(self._silent_s, self._drop, protocol)
        self._silent[protocol] = timer
        return protocol

    def heard(self, protocol: asyncio.BaseProtocol) -> None:
        """It has asked something."""
        if (timer := self._silent.pop(protocol, None)) is not None:
            timer.cancel()

    def _drop(self, protocol: asyncio.BaseProtocol) -> None:
        self.heard(protocol)
        transport = getattr(protocol, "transport", None)
        if transport is not None:
            transport.abort()
