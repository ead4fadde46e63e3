"""Access: who may come in to the chat in a browser. Looks at headers only, and at no framework's idea of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

Headers = Callable[[str], Sequence[str]]
"""all values of the header of a name"""


class Refused(Exception):  # noqa: N818 - it is an answer, not a fault
    """Not let in; `status` as HTTP has it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Access:
    """One person's way in: a link that opens once, and the cookie that a browser gets for it.

    All lies under a path that nobody can guess, and the cookie is for that path only: browsers send the cookies of a
    host to each of its ports, and another server on this machine shall not be told ours.
    """

    COOKIE = "edge_llm_chat"

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins` are what browsers may call our page, as `http://name:port` in lower case; the link leads to the first."""
        self._url, self._scheme = origins[0], urlsplit(origins[0]).scheme
        self._hosts = {urlsplit(origin).netloc for origin in origins}
        self.base = f"/{secrets.token_urlsafe(9)}/"
        self._cookie = secrets.token_urlsafe(32)
        self._key: str | None = None

    @property
    def waits(self) -> bool:
        """There is a link that nobody has used."""
        return self._key is not None

    def new_link(self) -> str:
        """A link that opens once; an older one opens no more. What follows the # is sent to no server, and kept in no log."""
        self._key = secrets.token_urlsafe(32)
        return f"{self._url}{self.base}#{self._key}"

    def enter(self, key: str) -> str | None:
        """What to set as a cookie for whoever has the key of the link, which is used up by it; None: it is not the key."""
        if self._key is None or not secrets.compare_digest(key.encode(), self._key.encode()):
            return None
        self._key = None
        return self._cookie

    @property
    def secure(self) -> bool:
        """The cookie is for encrypted connections only."""
        return self._scheme == "https"

    def check_host(self, headers: Headers) -> None:
        """Raises `Refused` for a name that is not ours: a page elsewhere may have been made to lead here (DNS rebinding)."""
        hosts = headers("Host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            raise Refused(421, "this chat does not answer to that name (--web-url names another address)")

    def check_origin(self, headers: Headers, *, required: bool) -> None:
        """Raises `Refused` for what another page asks for. Browsers send the header with a websocket and with POST, always."""
        origins = list(headers("Origin"))
        if (origins or required) and origins != [self.origin(headers)]:
            raise Refused(403, "other pages may not use this chat")

    def origin(self, headers: Headers) -> str:
        """What our own page is called when it is asked for by this name."""
        return f"{self._scheme}://{headers('Host')[0].lower()}"

    def knows(self, headers: Headers, cookie: str | None) -> bool:
        """Whether it is a browser that was let in, which asks of its own accord or our page's."""
        if cookie is None or not secrets.compare_digest(cookie.encode(), self._cookie.encode()):
            return False
        return all(site in ("none", "same-origin") for site in headers("Sec-Fetch-Site"))
