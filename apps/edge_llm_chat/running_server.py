"""running_server(): whether a server of this user can answer now."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from edge_llm import paths
from edge_llm.errors import StorageError

_TIMEOUT_S = 0.5
_ASK = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def running_server() -> Path | None:
    """The socket of this user's server, if it can answer now."""
    path = paths.server_socket()
    return path if answers(path) else None


def answers(path: Path) -> bool:
    """Asks GET /ready; no library is loaded for that, and a server that does not answer at once is none."""
    if not hasattr(socket, "AF_UNIX") or not path.exists():
        return False
    try:
        paths.require_private(path.parent)  # or who owns a socket says nothing: another one may take its place
        if path.stat().st_uid != os.geteuid():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(os.fspath(path))
            connection.sendall(_ASK)
            status = connection.recv(64).split(b" ")
    except (OSError, StorageError):
        return False
    return len(status) > 1 and status[1] == b"200"
