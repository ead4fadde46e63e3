"""ServerSettings: everything that can be set about the server; frozen, validated once, passed down."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from edge_llm.errors import ParameterError, quoted
from edge_llm_server.keys import ApiKey

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"https?://([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")

_WHOLE = {
    "port": (0, 65535),
    "max_body_bytes": (1 << 10, 1 << 30),
    "max_upload_bytes": (1 << 10, 1 << 32),
    "max_connections": (1, 65536),
    "requests_per_minute": (1, 10**9),
    "tokens_per_minute": (1, 10**12),
    "max_concurrent": (1, 65536),
}
_SECONDS = {
    "head_timeout_s": (0.1, 3600),
    "body_timeout_s": (0.1, 3600),
    "send_timeout_s": (0.1, 3600),
    "request_timeout_s": (0.1, 86400),
    "ping_s": (0.05, 3600),
    "load_wait_s": (0, 3600),
    "keep_alive_s": (0, 31536000),
    "grace_s": (0, 3600),
    "quality_watch_s": (1, 31536000),
}
_OPTIONAL = frozenset({"requests_per_minute", "tokens_per_minute", "max_concurrent", "keep_alive_s", "quality_watch_s"})


@dataclass(frozen=True)
class ServerSettings:
    """How the server is run. Raises `ParameterError` for what cannot be, or would open the machine to its network."""

    models: tuple[str, ...]
    """names under which models are offered; the first answers requests that name none"""
    host: str = "127.0.0.1"
    """address to listen on; another than the loopback's needs keys"""
    port: int = 8080
    """0: any that is free"""
    uds: Path | None = None
    """a unix socket to listen on as well, which needs no key: who may open it is said by its rights"""
    keys: tuple[ApiKey, ...] = ()
    """who may ask; none: everybody on this machine"""
    hosts: tuple[str, ...] = ()
    """names, with or without a port, by which clients call this server, beside localhost; needed behind a proxy"""
    origins: tuple[str, ...] = ()
    """web pages, as `https://name:port`, that may use the server from a browser; none by default"""

    max_body_bytes: int = 8 << 20
    max_upload_bytes: int = 64 << 20
    """of a file for a batch"""
    max_connections: int = 512
    head_timeout_s: float = 10.0
    """for a request's head, and between requests of a connection"""
    body_timeout_s: float = 10.0
    """for each piece of a request's body, and 30 times as long for all of it"""
    send_timeout_s: float = 20.0
    """for a client that takes nothing more"""
    request_timeout_s: float = 3600.0
    """for an answer, from submit to its end"""
    ping_s: float = 15.0
    """a stream on which nothing was said for so long says that it lives"""

    requests_per_minute: int | None = None
    """of each key"""
    tokens_per_minute: int | None = None
    """of each key, computed prompt tokens and generated ones"""
    max_concurrent: int | None = None
    """requests of each key at a time"""

    load_wait_s: float = 10.0
    """how long a request waits for its model to load before it is told to come again"""
    keep_alive_s: float | None = None
    """a model that nobody asked for so long is unloaded; None: never"""
    fallback: str | None = None
    """the model that answers where the wanted one cannot be loaded; the reply names it"""
    quality_watch_s: float | None = None
    """how often what the loaded models say is compared with what they said when they were imported; None: never"""
    grace_s: float = 10.0
    """how long answers may go on after SIGTERM"""

    def __post_init__(self) -> None:
        for name, (low, high) in {**_WHOLE, **_SECONDS}.items():
            _check_number(name, getattr(self, name), low, high, whole=name in _WHOLE)
        if not self.models:
            raise ParameterError("there is no model to serve", hint="give one with -m MODEL")
        if len(set(self.models)) < len(self.models):
            raise ParameterError("a model is given twice")
        if not isinstance(self.host, str) or not self.host:
            raise ParameterError("host must be an address to listen on", hint="for example 127.0.0.1")
        for text, pattern in [*((host, _HOST) for host in self.hosts), *((page, _ORIGIN) for page in self.origins)]:
            if not isinstance(text, str) or not pattern.fullmatch(text):
                raise ParameterError(
                    f"{quoted(str(text))} is no name of a host or origin of a page",
                    hint="a host is NAME or NAME:PORT, an origin http(s)://NAME or http(s)://NAME:PORT",
                )
        if not self.keys and not is_loopback(self.host):
            raise ParameterError(
                f"on {self.host} everybody in the network could use the server: it needs keys there",
                hint="give a file of keys with --keys FILE, or listen on 127.0.0.1",
            )
        if not self.keys and (self.hosts or self.origins):
            raise ParameterError(
                "a server that answers to other names or to web pages needs keys", hint="give them with --keys FILE"
            )

    def allowed_hosts(self, port: int) -> frozenset[str]:
        """The values of the Host header that are answered when the server listens on `port`, in lower case."""
        names = {*LOOPBACK_NAMES, *(f"{name}:{port}" for name in LOOPBACK_NAMES)} if port == 80 else set()
        names |= {f"{name}:{port}" for name in LOOPBACK_NAMES}
        own = f"[{self.host}]" if ":" in self.host else self.host
        if own not in ("0.0.0.0", "[::]"):  # an address that means all of them is nobody's name
            names.add(f"{own}:{port}")
        for host in self.hosts:
            names |= {host} if re.search(r":[0-9]+$", host) and not host.endswith("]") else {host, f"{host}:{port}"}
        return frozenset(name.lower() for name in names)

    def with_options(self, **changes: Any) -> Self:
        """A changed, validated copy."""
        return replace(self, **changes)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost may be anybody's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_number(name: str, value: Any, low: float, high: float, *, whole: bool) -> None:
    if value is None and name in _OPTIONAL:
        return
    kind: Any = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        raise ParameterError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    if not low <= value <= high:
        raise ParameterError(f"{name} must be between {low} and {high}, not {value:g}")
