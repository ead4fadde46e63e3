"""Site: the pages, the way in, and the websocket behind which a chat runs; no more of them than there are seats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from edge_llm_chat.web.access import Access, Headers, Refused
from edge_llm_chat.web.session import Session, fits

SEATS = 4
"""chats at a time"""
WAIT_S = 3.0
"""how long somebody who comes waits for a seat: that of a tab which is loaded again is free in a moment"""
_PAGES = Path(str(files("edge_llm_chat.web"))) / "pages"
_KEY_BYTES = 256
_MESSAGE_BYTES = 1 << 24
_HEARTBEAT_S = 20.0
_ENDING_S = 10.0
_HEADERS = {
    "Server": "edge-llm",
    "Cache-Control": "no-cache",
    # nothing from elsewhere, and nothing of ours elsewhere; the terminal's own script makes style elements
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _statics() -> dict[str, Path]:
    """The files that may be had, by name: our own, and the terminal that comes with textual-serve."""
    theirs = Path(str(files("textual_serve"))) / "static"
    return {
        **{name: _PAGES / name for name in ("look.css", "chat.js", "door.js")},
        "textual.js": theirs / "js" / "textual.js",
        "xterm.css": theirs / "css" / "xterm.css",
        "RobotoMono.ttf": theirs / "fonts" / "RobotoMono-VariableFont_wght.ttf",
        "RobotoMono-Italic.ttf": theirs / "fonts" / "RobotoMono-Italic-VariableFont_wght.ttf",
    }


class Site:
    """Serves chats to browsers that `access` lets in; `begin` makes the session of a websocket.

    `told` is called with a new link when a browser has come that has no key, and the last link is used up.
    """

    def __init__(
        self,
        access: Access,
        begin: Callable[[web.WebSocketResponse], Session],
        told: Callable[[str], None] = lambda _link: None,
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        self._access, self._begin, self._told, self._wait_s = access, begin, told, wait_s
        self._seats = asyncio.Semaphore(SEATS)
        self._open: set[web.WebSocketResponse] = set()
        self._statics = _statics()

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answers while the block runs; all chats have ended after it."""
        quiet = logging.getLogger("edge_llm_chat.web")  # what a request holds does not get into a log
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False
        runner = web.AppRunner(self.application(), access_log=None, logger=quiet, shutdown_timeout=_ENDING_S)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield
        finally:
            await runner.cleanup()

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=_KEY_BYTES)
        base = self._access.base
        application.add_routes(
            [
                web.get(base, self._page, allow_head=False),
                web.post(f"{base}enter", self._enter),
                web.get(f"{base}ws", self._websocket, allow_head=False),
                web.get(f"{base}static/{{name}}", self._static, allow_head=False),
            ]
        )
        application.on_response_prepare.append(_add_headers)
        application.on_shutdown.append(self._close)
        return application

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Host and Origin first, whatever is asked for."""
        try:
            self._access.check_host(_headers(request))
            self._access.check_origin(_headers(request), required=request.method != "GET")
            return await handler(request)
        except Refused as refused:
            return web.Response(status=refused.status, text=f"{refused}\n")
        except web.HTTPException as error:
            return web.Response(status=error.status, text=f"{error.reason}\n")

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if not self._known(request):
            if not self._access.waits:
                self._told(self._access.new_link())
            return web.FileResponse(_PAGES / "door.html", status=403)
        if not await self._take_seat():
            return web.FileResponse(_PAGES / "full.html", status=503)
        self._seats.release()  # the websocket that the page opens takes one
        return web.FileResponse(_PAGES / "chat.html")

    async def _enter(self, request: web.Request) -> web.StreamResponse:
        cookie = self._access.enter((await request.read()).decode("utf-8", "replace"))
        if cookie is None:
            raise Refused(403, "this is not the key of the last link")
        response = web.Response(status=204)
        response.set_cookie(
            Access.COOKIE,
            cookie,
            path=self._access.base,
            httponly=True,
            samesite="Strict",
            secure=self._access.secure or None,
        )
        return response

    async def _static(self, request: web.Request) -> web.StreamResponse:
        path = self._statics.get(request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound
        return web.FileResponse(path)

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        self._access.check_origin(_headers(request), required=True)
        if not self._known(request):
            raise Refused(403, "this browser does not have the key")
        width, height = _cells(request, "width"), _cells(request, "height")
        if not await self._take_seat():
            raise Refused(503, f"{SEATS} chats are open already")
        try:
            websocket = web.WebSocketResponse(heartbeat=_HEARTBEAT_S, max_msg_size=_MESSAGE_BYTES, compress=False)
            await websocket.prepare(request)
            self._open.add(websocket)
            try:
                await self._begin(websocket).talk(width, height)
            finally:
                self._open.discard(websocket)
                await websocket.close()
            return websocket
        finally:
            self._seats.release()

    def _known(self, request: web.Request) -> bool:
        return self._access.knows(_headers(request), request.cookies.get(Access.COOKIE))

    async def _take_seat(self) -> bool:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._seats.acquire()
        except TimeoutError:
            return False
        return True

    async def _close(self, _application: web.Application) -> None:
        await asyncio.gather(*(websocket.close(code=1001) for websocket in self._open))


def _headers(request: web.Request) -> Headers:
    return lambda name: request.headers.getall(name, [])


def _cells(request: web.Request, name: str) -> int:
    """How wide or high the page is. Raises `Refused`."""
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 6 and fits(int(text))):
        raise Refused(400, f"{name} must be a number of cells")
    return int(text)


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
