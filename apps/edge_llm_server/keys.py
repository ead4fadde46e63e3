"""API keys: who may ask, known by a name; read from a private file or the environment."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from edge_llm.errors import InputError, ParameterError, quoted

ENVIRONMENT = "EDGE_LLM_API_KEYS"
MIN_SECRET = 16
"""characters; shorter ones can be guessed"""
MAX_SECRET = 512
MAX_KEYS = 1024
_MAX_FILE_BYTES = 1 << 20
_HINT = (
    "a line is NAME KEY or NAME KEY SCOPE; a good key: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
)


class Scope(StrEnum):
    """What a key opens."""

    ALL = "all"
    METRICS = "metrics"
    """only /metrics and /ready: for a monitoring program"""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. The name stands in logs and keeps the prefix caches of keys apart; of the key itself only a hash is kept.

    Raises `ParameterError` for a name or a secret that cannot be one.
    """

    name: str
    digest: bytes = field(repr=False)
    scope: Scope = Scope.ALL

    @classmethod
    def of(cls, name: str, secret: str, scope: str = Scope.ALL) -> ApiKey:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise ParameterError(f"{quoted(name)} cannot be the name of a key", hint="letters, digits and . _ -")
        if not MIN_SECRET <= len(secret) <= MAX_SECRET or not re.fullmatch(r"[!-~]+", secret):
            raise ParameterError(
                f"the key of {name} must have {MIN_SECRET} to {MAX_SECRET} visible ASCII characters", hint=_HINT
            )
        if scope not in tuple(Scope):
            raise ParameterError(f"the scope of {name} must be {' or '.join(Scope)}", hint=_HINT)
        return cls(name, _digest(secret.encode("ascii")), Scope(scope))


def _digest(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32).digest()


class KeyRing:
    """All keys. A lookup takes the same time whichever key it is, and whether it is one."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, secret: bytes) -> ApiKey | None:
        digest, found = _digest(secret), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file that only its owner may read. Raises `InputError`, never showing a key."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
        with open(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise InputError(f"{path} is not a file of keys")
            if os.name == "posix" and (info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o077):
                raise InputError(f"other users may read or change the keys in {path}", hint=f"chmod 600 {path}")
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the keys in {path}: {error.strerror}", hint="check the path and its rights"
        ) from None
    if len(data) > _MAX_FILE_BYTES:
        raise InputError(f"{path} is too large for a file of keys")
    lines = data.decode("ascii", "replace").splitlines()
    entries = [(number, line.split()) for number, line in enumerate(lines, 1)]
    wanted = [(number, words) for number, words in entries if words and not words[0].startswith("#")]
    return _keys((f"line {number} of {path}", words) for number, words in wanted)


def keys_of_environment(text: str) -> tuple[ApiKey, ...]:
    """The keys of EDGE_LLM_API_KEYS: `NAME:KEY` or `NAME:KEY:SCOPE`, with commas between them."""
    return _keys((ENVIRONMENT, entry.strip().split(":")) for entry in text.split(",") if entry.strip())


def _keys(entries: Iterable[tuple[str, list[str]]]) -> tuple[ApiKey, ...]:
    keys: dict[str, ApiKey] = {}
    for place, words in entries:
        if len(words) not in (2, 3):
            raise ParameterError(f"{place} is not a key with a name", hint=_HINT)
        key = ApiKey.of(*words)
        if key.name in keys or any(other.digest == key.digest for other in keys.values()):
            raise ParameterError(f"{place}: the key of {key.name} is there twice")
        keys[key.name] = key
    if not 0 < len(keys) <= MAX_KEYS:
        raise ParameterError(f"there must be 1 to {MAX_KEYS} keys, not {len(keys)}", hint=_HINT)
    return tuple(keys.values())
