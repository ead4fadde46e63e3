"""running_server(): the socket of this user's own server, if there is one that can answer now."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from edge_llm import paths

_TIMEOUT_S = 0.5
_ASK = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def running_server() -> Path | None:
    """Asks GET /ready; no library is loaded for that, and a server that does not answer at once is none."""
    path = paths.server_socket()
    if not hasattr(socket, "AF_UNIX") or not path.exists():
        return None
    try:
        if path.stat().st_uid != os.geteuid():
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(os.fspath(path))
            connection.sendall(_ASK)
            status = connection.recv(64).split(b" ")
    except OSError:
        return None
    return path if len(status) > 1 and status[1] == b"200" else None
