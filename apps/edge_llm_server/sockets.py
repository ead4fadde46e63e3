"""The sockets that a server listens on: TCP, and a unix socket that only its owner can open."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from edge_llm.errors import InputError
from edge_llm.paths import private_dir

_BACKLOG = 512


def tcp_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `InputError` where that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # who connects from now on is answered as soon as the server runs
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        hint = {
            errno.EADDRINUSE: "choose another --port",
            errno.EACCES: "choose a --port from 1024 on: those below are the administrator's",
        }.get(error.errno or 0, "give an address of this machine with --host, for example 127.0.0.1")
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from None
    listener.setblocking(False)
    return listener


def unix_socket(path: Path) -> socket.socket | None:
    """A listening unix socket (0600, in a folder of 0700), or None if another server answers there already.

    Raises `InputError` where that is not possible.
    """
    private_dir(path.parent)
    if _answers(path):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener.bind(os.fspath(path))  # the folder keeps others out until the rights are set
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on {path}: {error.strerror or error}", hint="choose another --uds") from None
    listener.setblocking(False)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True
