"""What the server may be set to, and its keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from edge_llm_server.keys import ApiKey, KeyRing, Scope, keys_of_environment, read_keys
from edge_llm_server.settings import ServerSettings, is_loopback

from edge_llm.errors import InputError, ParameterError

KEY = ApiKey.of("me", "s" * 32)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", "localhost.", "127.0.0.1.evil", "1"])
def test_an_address_that_others_reach_needs_keys(host: str) -> None:
    with pytest.raises(ParameterError, match="needs keys"):
        ServerSettings(models=("m",), host=host)
    assert ServerSettings(models=("m",), host=host, keys=(KEY,)).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    assert is_loopback(host)
    assert ServerSettings(models=("m",), host=host).keys == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ()}, "no model"),
        ({"models": ("a", "a")}, "twice"),
        ({"port": 70000}, "port must be between"),
        ({"port": True}, "port must be a whole number"),
        ({"grace_s": float("nan")}, "grace_s must be a number"),
        ({"max_body_bytes": None}, "max_body_bytes"),
        ({"hosts": ("a/b",), "keys": (KEY,)}, "no name of a host"),
        ({"origins": ("https://a/",), "keys": (KEY,)}, "no name of a host"),
        ({"origins": ("*",), "keys": (KEY,)}, "no name of a host"),
        ({"origins": ("https://a",)}, "needs keys"),
        ({"hosts": ("a",)}, "needs keys"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        ServerSettings(**{"models": ("m",), **changes})


def test_hosts_are_those_of_the_address_and_those_that_were_given() -> None:
    settings = ServerSettings(models=("m",), host="::1", keys=(KEY,), hosts=("AI.example", "b.example:1"))
    own = {"localhost:8080", "127.0.0.1:8080", "[::1]:8080"}
    assert settings.allowed_hosts(8080) == own | {"ai.example", "ai.example:8080", "b.example:1"}
    everywhere = ServerSettings(models=("m",), host="0.0.0.0", keys=(KEY,))
    assert everywhere.allowed_hosts(80) == {
        *(f"{name}{port}" for name in ("localhost", "127.0.0.1", "[::1]") for port in ("", ":80"))
    }


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_come_from_a_private_file(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"# of the house\n\nann {'a' * 16}\nscraper {'b' * 40} metrics\n")
    keys = read_keys(file)
    assert [(key.name, key.scope) for key in keys] == [("ann", Scope.ALL), ("scraper", Scope.METRICS)]
    ring = KeyRing(keys)
    assert ring.find(b"a" * 16) == keys[0]
    assert ring.find(b"a" * 17) is None
    assert ring.find(b"") is None
    assert "a" * 16 not in repr(keys)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InputError, match="other users may read"):
        read_keys(write(tmp_path / "keys", f"ann {'a' * 16}", mode))


@pytest.mark.parametrize(
    "text",
    ["", "ann", "ann short", f"ann {'a' * 16} other", f"a/b {'a' * 16}", f"a {'a' * 16}\na {'b' * 16}",
     f"a {'a' * 16}\nb {'a' * 16}", f"a {'a' * 16} metrics x", "ann " + "ä" * 20, "x" * (2 << 20)],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as caught:
        read_keys(write(tmp_path / "keys", text))
    assert "a" * 16 not in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "missing"):
        with pytest.raises(InputError):
            read_keys(path)


def test_keys_come_from_the_environment() -> None:
    keys = keys_of_environment(f"ann:{'a' * 16}, scraper:{'b' * 16}:metrics,")
    assert [(key.name, key.scope) for key in keys] == [("ann", Scope.ALL), ("scraper", Scope.METRICS)]
    with pytest.raises(ParameterError, match="not a key with a name"):
        keys_of_environment("a" * 16)
