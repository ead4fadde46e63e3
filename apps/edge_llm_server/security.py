"""Guard: the outermost layer of the application. Whoever is not let in here never reaches a route.

In this order: Host (400, 421), Origin and Sec-Fetch-Site (403), key (401), scope (403), content type (415), limits (429), and
while the body is read its size (413) and pace (408). It looks at nothing but the ASGI scope's own path and headers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from edge_llm import machine
from edge_llm_server.api_error import ApiError
from edge_llm_server.exchange import RETRIES, STATE, Exchange, Log, RequestCounts, place_of, request_id
from edge_llm_server.keys import KeyRing, Scope
from edge_llm_server.limits import Limits
from edge_llm_server.settings import ServerSettings

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]

PUBLIC = frozenset({"/health"})
"""paths that need no key"""
METRICS_PATHS = frozenset({"/metrics", "/ready"})
"""what a key of the scope `metrics` opens"""
UPLOAD = "/v1/files"
"""the one path that takes a form: a file is not JSON"""
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_METHODS = _SAFE_METHODS | {"POST", "DELETE"}
_BODY_TIMES = 30
_MUCH_BYTES = 1 << 20
"""of a body, which leaves several times as much of freed memory with the C library"""


class Door:
    """How a connection came in: what it may call the server, and whether it must show a key."""

    def __init__(self, hosts: frozenset[str], *, trusted: bool) -> None:
        self.hosts = hosts
        self.trusted = trusted
        """a unix socket: the file's rights have been checked by the system"""


class Guard:
    """An ASGI application around `app`, for connections that come in by `door`."""

    def __init__(
        self,
        app: Application,
        settings: ServerSettings,
        door: Door,
        limits: Limits,
        log: Log,
        counts: RequestCounts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app, self._settings, self._door = app, settings, door
        self._limits, self._log, self._counts = limits, log, counts
        self._keys = KeyRing(settings.keys)
        self._clock = clock

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # nothing here speaks over websockets
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        started = self._clock()
        headers = _Headers(scope["headers"])
        exchange = Exchange(request_id(headers.all(b"x-request-id")), scope["method"], scope["path"])
        exchange.retry = headers.all(RETRIES) not in ([], [b"0"])
        scope[STATE] = exchange
        body = _Body(receive, exchange, self._settings, upload=scope["path"] == UPLOAD)
        reply = _Reply(send, exchange, self._cors(headers))
        try:
            if not await self._preflight(scope, headers, reply):
                self._admit(exchange, headers)
                await self._answer(scope, exchange, headers, body, reply)
        except ApiError as error:
            await body.drain(headers)
            await reply.refuse(error)
        except asyncio.CancelledError:  # the grace is over
            if reply.started:
                raise
            await reply.refuse(ApiError.unavailable("the server is stopping", 5.0))
        except Exception as error:
            exchange.fault = place_of(error)
            if not reply.ended:
                raise ConnectionAbortedError("the answer cannot be completed") from None
        finally:
            exchange.route = getattr(scope.get("route"), "path", None)
            if exchange.bytes_in > _MUCH_BYTES:
                machine.return_freed_memory_later()
            self._counts.add(exchange)
            self._log("request", **exchange.log_entry(self._clock() - started))

    async def _answer(
        self, scope: dict[str, Any], exchange: Exchange, headers: _Headers, body: _Body, reply: _Reply
    ) -> None:
        if scope["method"] in _SAFE_METHODS:
            await self._app(scope, body.receive, reply.send)
            return
        body.check_head(headers)
        with self._limits.request(exchange.key):
            try:
                await self._app(scope, body.receive, reply.send)
            finally:
                self._limits.used(exchange.key, exchange.cost)

    def _admit(self, exchange: Exchange, headers: _Headers) -> None:
        """Raises `ApiError` unless the caller may make this request."""
        self._check_host(headers)
        self._check_origin(headers)
        if exchange.method not in _METHODS:
            self._check_key(exchange, headers)
            raise ApiError(405, f"{exchange.method[:16]!a} is not answered here", code="method_not_allowed")
        if exchange.path not in PUBLIC or exchange.method not in _SAFE_METHODS:
            self._check_key(exchange, headers)

    def _check_host(self, headers: _Headers) -> None:
        hosts = headers.all(b"host")
        if len(hosts) != 1:
            raise ApiError.invalid("a request has exactly one Host header")
        if hosts[0].lower().decode("latin-1") not in self._door.hosts:
            raise ApiError(
                421, "this server does not answer to that name (--allow-host adds names)", code="misdirected_request"
            )

    def _check_origin(self, headers: _Headers) -> None:
        origins = headers.all(b"origin")
        if origins:
            if len(origins) != 1 or origins[0].decode("latin-1") not in self._settings.origins:
                raise ApiError(403, "web pages of that origin may not use this server", code="forbidden_origin")
        elif any(site not in (b"none", b"same-origin") for site in headers.all(b"sec-fetch-site")):
            raise ApiError(403, "other web pages may not use this server", code="forbidden_origin")

    def _check_key(self, exchange: Exchange, headers: _Headers) -> None:
        if self._door.trusted or not self._keys:
            return
        given = headers.all(b"authorization")
        scheme, _, secret = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        key = self._keys.find(secret.strip(b" ")) if scheme.lower() == b"bearer" else None
        if key is None:
            raise ApiError(401, "a key is needed: send it as `Authorization: Bearer KEY`", code="invalid_api_key")
        exchange.key, exchange.scope = key.name, key.scope
        if key.scope is Scope.METRICS and exchange.path not in METRICS_PATHS:
            raise ApiError(403, f"the key {key.name} opens {' and '.join(sorted(METRICS_PATHS))} only", code="scope")

    def _cors(self, headers: _Headers) -> dict[bytes, bytes]:
        """What a browser must hear before it shows a reply to a page that was let in."""
        origins = headers.all(b"origin")
        if len(origins) == 1 and origins[0].decode("latin-1") in self._settings.origins:
            return {b"access-control-allow-origin": origins[0], b"vary": b"origin"}
        return {}

    async def _preflight(self, scope: dict[str, Any], headers: _Headers, reply: _Reply) -> bool:
        """Answers a browser that asks whether a page may ask, where pages may."""
        if scope["method"] != "OPTIONS" or not headers.all(b"access-control-request-method"):
            return False
        self._check_host(headers)
        self._check_origin(headers)
        if not self._settings.origins:
            return False
        allowed = {
            b"access-control-allow-methods": b"GET, POST, DELETE",
            b"access-control-allow-headers": b"authorization, content-type, x-request-id",
            b"access-control-max-age": b"600",
        }
        await reply.send({"type": "http.response.start", "status": 204, "headers": list(allowed.items())})
        await reply.send({"type": "http.response.body", "body": b""})
        return True


class _Headers:
    def __init__(self, pairs: Any) -> None:
        self._pairs = [(bytes(name).lower(), bytes(value)) for name, value in pairs]

    def all(self, name: bytes) -> list[bytes]:
        return [value for own, value in self._pairs if own == name]

    @property
    def have_body(self) -> bool:
        return self.all(b"content-length") not in ([], [b"0"]) or bool(self.all(b"transfer-encoding"))


class _Body:
    """The request's body on its way to the application: counted, and not waited for without end."""

    def __init__(self, receive: Receive, exchange: Exchange, settings: ServerSettings, *, upload: bool) -> None:
        self._receive, self._exchange, self._upload = receive, exchange, upload
        self._most = settings.max_upload_bytes if upload else settings.max_body_bytes
        self._pause_s = settings.body_timeout_s
        self._left_s = settings.body_timeout_s * _BODY_TIMES
        self._ended = False

    def check_head(self, headers: _Headers) -> None:
        """Raises `ApiError` 415 or 413 for what the head tells already."""
        if any(coding.lower() != b"identity" for coding in headers.all(b"content-encoding")):
            raise ApiError(415, "compressed bodies are not taken", code="unsupported_media_type")
        wanted = b"multipart/form-data" if self._upload else b"application/json"
        kinds = headers.all(b"content-type")
        plain = len(kinds) == 1 and kinds[0].partition(b";")[0].strip().lower() == wanted
        if not plain and not (self._exchange.method == "DELETE" and not kinds and not headers.have_body):
            raise ApiError(415, f"the Content-Type must be {wanted.decode()}", code="unsupported_media_type")
        for length in headers.all(b"content-length"):
            if not length.isdigit() or len(length) > 18:
                raise ApiError.invalid("Content-Length is no number")
            if int(length) > self._most:
                raise self._too_large()

    async def receive(self) -> Message:
        if self._ended:
            return await self._receive()  # waits until the client is gone
        try:
            async with asyncio.timeout(min(self._pause_s, self._left_s)):
                before = asyncio.get_running_loop().time()
                message = await self._receive()
                self._left_s = max(0.0, self._left_s - (asyncio.get_running_loop().time() - before))
        except TimeoutError:
            self._ended = True
            raise ApiError(408, "the body of the request did not come in time", code="request_timeout") from None
        if message["type"] == "http.request":
            self._exchange.bytes_in += len(message.get("body", b""))
            self._ended = not message.get("more_body", False)
            if self._exchange.bytes_in > self._most:
                raise self._too_large()
        else:
            self._ended = True
        return message

    async def drain(self, headers: _Headers) -> None:
        """Reads what is still coming, so that the client hears the refusal; no more than a body may have."""
        if not headers.have_body:
            return
        left, self._most = self._most, 1 << 62
        try:
            while not self._ended and left > 0:
                left -= len((await self.receive()).get("body", b""))
        except ApiError:
            pass

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._most} bytes", code="request_too_large")


class _Reply:
    """The reply on its way to the client."""

    def __init__(self, send: Send, exchange: Exchange, headers: Mapping[bytes, bytes]) -> None:
        self._send, self._exchange = send, exchange
        self._own = [
            (b"x-request-id", exchange.id.encode("ascii")),
            (b"x-content-type-options", b"nosniff"),
            (b"cache-control", b"no-store"),
            *headers.items(),
        ]
        self.started = self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._exchange.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._own]}
        else:
            self._exchange.bytes_out += len(message.get("body", b""))
            self.ended = not message.get("more_body", False)
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Say what is wrong. The connection ends: what was not read of the request must not become the next one."""
        if self.started:
            raise ConnectionAbortedError("the answer cannot be completed")
        content = json.dumps(error.body_for(self._exchange.path)).encode("ascii")
        headers = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        pairs = [(name.encode("ascii"), value.encode("ascii")) for name, value in {**headers, **error.headers}.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": content})
