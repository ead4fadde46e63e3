"""F25: whom the server lets in: Host x Origin x key x route x method, against a list written by hand.

python -m tools.trust.server F25 [--size commit|nightly] [--seed N]

A trial is one request to the guard, asked directly. It must reach the application if and only if all of its parts are allowed,
and else be refused with the status of the first part that is not.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

from edge_llm_server.exchange import Log, RequestCounts
from edge_llm_server.keys import ApiKey
from edge_llm_server.limits import Limits
from edge_llm_server.security import Door, Guard
from edge_llm_server.settings import ServerSettings

from tools.trust.figure import Figure

PORT = 8080
ALLOWED_HOSTS = ("localhost:8080", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:8080", "ai.example:8080", "ai.example")
FOREIGN_HOSTS = (
    *("localhost", "127.0.0.1", "[::1]", "127.0.0.1:80", "localhost:8081", "localhost:08080", "localhost:8080:8080"),
    *("evil.example", "evil.example:8080", "localhost.evil.example:8080", "127.0.0.1.evil.example:8080"),
    *("localhost.:8080", "127.0.0.1.:8080", "0.0.0.0:8080", "127.1:8080", "127.0.0.2:8080", "2130706433:8080"),
    *("[::ffff:127.0.0.1]:8080", "[::]:8080", "::1:8080", "[0:0:0:0:0:0:0:1]:8080", "192.168.1.5:8080"),
    *("a/?x=localhost:8080", "localhost:8080/", "localhost:8080#", "x#localhost:8080", "user@localhost:8080"),
    *("localhost:8080@evil.example", "@localhost:8080", " localhost:8080", "localhost:8080 ", "localhost:8080,evil"),
    *("", ":8080", "localhost:", "box.local:8080", "ai.internal:8080", "xn--localhost:8080", "ai.example:80"),
    *("ai.example.:8080", "sub.ai.example", "localhost\t:8080", "localhost:8080\x00", "l\u00f6calhost:8080"),
)
HOSTS: tuple[tuple[str, ...], ...] = (
    *((host,) for host in (*ALLOWED_HOSTS, *FOREIGN_HOSTS)),
    (),
    ("localhost:8080", "localhost:8080"),
    ("localhost:8080", "evil.example"),
)
"""values of the Host header: one, none, or more than one"""
ORIGIN_ALLOWED = "https://chat.example"
ORIGINS: tuple[tuple[tuple[str, str], ...], ...] = (
    (),
    (("origin", ORIGIN_ALLOWED),),
    (("origin", ORIGIN_ALLOWED), ("sec-fetch-site", "cross-site")),
    (("sec-fetch-site", "none"),),
    (("sec-fetch-site", "same-origin"),),
    (("origin", "null"),),
    (("origin", ""),),
    (("origin", "http://localhost:8080"),),
    (("origin", "http://127.0.0.1:8080"),),
    (("origin", "http://chat.example"),),
    (("origin", "https://chat.example.evil.example"),),
    (("origin", "https://chat.example:443"),),
    (("origin", "https://CHAT.example"),),
    (("origin", "https://chat.example/"),),
    (("origin", ORIGIN_ALLOWED), ("origin", "https://evil.example")),
    (("origin", f"{ORIGIN_ALLOWED}, https://evil.example"),),
    (("origin", "file://"),),
    (("sec-fetch-site", "cross-site"),),
    (("sec-fetch-site", "same-site"),),
    (("sec-fetch-site", ""),),
)
SECRET, SCRAPER = "k" * 32, "m" * 32
KEYS: tuple[tuple[str, ...], ...] = (
    (f"Bearer {SECRET}",),
    (f"bearer {SECRET}",),
    (f"Bearer {SCRAPER}",),
    (),
    ("",),
    ("Bearer",),
    ("Bearer ",),
    (SECRET,),
    (f"Basic {SECRET}",),
    (f"Bearer {SECRET}x",),
    (f"Bearer {SECRET[:-1]}",),
    (f"Bearer {SECRET.upper()}",),
    (f"Bearer {SECRET}", f"Bearer {SECRET}"),
    (f"Bearer {SECRET}, Bearer x",),
)
PATHS = (
    *("/health", "/ready", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/files", "/api/chat", "/nothing"),
    *("/health/", "//health", "/HEALTH", "/health/../v1/models", "/%68ealth", "/health;x", "/health?x", "", "*", "/"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "PROPFIND")


def expected(
    host: tuple[str, ...], origin: tuple[tuple[str, str], ...], key: tuple[str, ...], path: str, method: str
) -> int:
    """The status of the refusal, or 204 where the application is reached."""
    if len(host) != 1:
        return 400
    if host[0] not in ALLOWED_HOSTS:
        return 421
    if origin not in ORIGINS[:5]:
        return 403
    public = path == "/health" and method in ("GET", "HEAD")
    if not public:
        if key not in KEYS[:3]:
            return 401
        if key == KEYS[2] and path not in ("/metrics", "/ready"):
            return 403
    return 204 if method in ("GET", "HEAD", "POST", "DELETE") else 405


def guard(reached: list[str]) -> Guard:
    """A guard of two keys, one more name and one page, around an application that notes its paths."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    settings = ServerSettings(
        models=("m",),
        keys=(ApiKey.of("user", SECRET), ApiKey.of("scraper", SCRAPER, "metrics")),
        hosts=("ai.example",),
        origins=(ORIGIN_ALLOWED,),
    )
    door = Door(settings.allowed_hosts(PORT), trusted=False)
    return Guard(application, settings, door, Limits(settings), Log(io.StringIO()), RequestCounts())


async def ask(guarded: Guard, method: str, path: str, headers: Sequence[tuple[str, str]]) -> tuple[int, dict[str, str]]:
    """Status and headers of the reply."""
    replies: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        replies.append(message)

    pairs = [(name.encode("ascii"), value.encode("utf-8")) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": pairs, "http_version": "1.1", "scheme": "http", "root_path": ""}  # fmt: skip
    await guarded(scope, receive, send)
    return replies[0]["status"], {name.decode(): value.decode() for name, value in replies[0]["headers"]}


def matrix(count: int, seed: int) -> int:
    """At least `count` cells: each value of each part with all the others allowed, then a random choice of the rest."""
    axes: tuple[Sequence[Any], ...] = (HOSTS, ORIGINS, KEYS, PATHS, METHODS)
    best = tuple(axis[0] for axis in axes)
    cells = [(*best[:i], value, *best[i + 1 :]) for i, axis in enumerate(axes) for value in axis]
    for first, second in itertools.combinations(range(len(axes)), 2):
        for pair in itertools.product(axes[first], axes[second]):
            cell = list(best)
            cell[first], cell[second] = pair
            cells.append(tuple(cell))
    chosen = random.Random(seed)
    while len(cells) < count:
        kinds = [axis if chosen.random() < 0.5 else axis[: max(1, len(axis) // 4)] for axis in axes]
        cells.append(tuple(chosen.choice(kind) for kind in kinds))
    asyncio.run(_try_all(cells))
    return len(cells)


async def _try_all(cells: Sequence[tuple[Any, ...]]) -> None:
    reached: list[str] = []
    guarded = guard(reached)
    for cell in cells:
        host, origin, key, path, method = cell
        headers = [("host", value) for value in host] + list(origin) + [("authorization", value) for value in key]
        reached.clear()
        status, given = await ask(guarded, method, path, [*headers, ("content-type", _kind_for(path))])
        wanted = expected(*cell)
        if status != wanted or bool(reached) != (wanted == 204):
            raise RuntimeError(f"{cell}: {status} instead of {wanted}")
        page = given.get("access-control-allow-origin")
        if page is not None and (("origin", page) not in origin or page != ORIGIN_ALLOWED):
            raise RuntimeError(f"{cell}: shown to the page {page}")


def _kind_for(path: str) -> str:
    return "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"


FIGURES = {
    "F25": Figure(
        "F25",
        "requests to the server's guard (Host x Origin x key x route x method)",
        "python -m tools.trust.server F25",
        {"commit": 24_000, "nightly": 1_000_000},
        matrix,
    )
}


if __name__ == "__main__":
    sys.exit(FIGURES[sys.argv[1]].main(sys.argv[2:]))
