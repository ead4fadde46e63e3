"""Where things live on disk: the config, data and cache folders named `edge-llm`. Nothing is created at import.

EDGE_LLM_HOME, when set, holds all three (as config, data, cache): for portable installs and tests. A user without a home
folder gets one among the temporary files; if somebody else has put one there, asking for it raises `StorageError`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import platformdirs

from edge_llm.errors import StorageError

_APP = "edge-llm"
_MAX_SOCKET_PATH = 100
"""bytes; Linux has room for 107, others for less"""


def _base(kind: str, default: Callable[[str, Literal[False]], str]) -> Path:
    if home := os.environ.get("EDGE_LLM_HOME"):
        return Path(os.path.expanduser(home)).absolute() / kind
    try:
        folder = Path(default(_APP, False))
    except RuntimeError:
        folder = Path()
    if folder.is_absolute():
        return folder
    # without HOME and without an entry among the users, as in some containers, "~" means nothing
    stand_in = _temporary()
    if os.path.lexists(stand_in):  # what is there is read, too
        require_private(stand_in)
    return stand_in / kind


def _temporary() -> Path:
    """What stands in for a home that is missing or cannot be written. Not made here: others could have put theirs there."""
    return Path(tempfile.gettempdir(), f"{_APP}-{os.geteuid()}")


def config_dir() -> Path:
    """Folder of config.toml; may not exist yet."""
    return _base("config", platformdirs.user_config_dir)


def data_dir() -> Path:
    """Folder of imported models and chat history; may not exist yet."""
    return _base("data", platformdirs.user_data_dir)


def cache_dir(*, temporary: bool = False) -> Path:
    """Folder of compiled kernels, downloads and cached prefixes, all of which can be rebuilt; may not exist yet.

    `temporary`: the one that takes its place among the temporary files where it cannot be written.
    """
    return _temporary() / "cache" if temporary else _base("cache", platformdirs.user_cache_dir)


def server_socket() -> Path:
    """The unix socket of this user's server: a folder of its own that goes with the session, or stands in EDGE_LLM_HOME.

    Where nothing can be written, or the path is longer than the system allows for a socket, a short one among the temporary
    files takes its place.
    """
    return _socket("server")


def web_socket(pid: int) -> Path:
    """The unix socket of the server behind the chats in a browser of the program `pid`, beside `server_socket`."""
    return _socket(f"web-{pid}")


def _socket(name: str) -> Path:
    path = _base("run", platformdirs.user_runtime_dir) / f"{name}.sock"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH or obstacle(path.parent) is not None:
        digest = hashlib.blake2b(os.fsencode(path.parent), digest_size=8).hexdigest()
        path = _temporary() / f"{name}-{digest}.sock"
    return path


def private_cache(name: str, *, temporary: bool = False) -> Path:
    """The folder `name` of the cache folder, both made if need be and only their owner's. Raises `StorageError`."""
    if temporary:
        private_dir(_temporary())
    return private_dir(private_dir(cache_dir(temporary=temporary)) / name)


def obstacle(folder: Path) -> str | None:
    """What stands in the way of writing to `folder`, which need not be there yet; None if nothing does. Creates nothing."""
    for path in (folder, *folder.parents):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{path}: {error.strerror}"
        if not stat.S_ISDIR(mode):
            return f"{path} is not a folder"
        return None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written"
    return None


def private_dir(path: Path) -> Path:
    """Create `path` (0700) if missing and give it back once it is a real folder that only its owner can use.

    Raises `StorageError` if it cannot be made, or as `require_private`.
    """
    if os.name == "posix":
        _require_fixed(path)  # first: nothing is made where somebody else's link leads
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = obstacle(path) if isinstance(error, NotADirectoryError | FileExistsError) else None
        raise StorageError(
            f"cannot create the folder {path}: {in_the_way or error.strerror}",
            hint="set EDGE_LLM_HOME to a folder you can write to",
        ) from None
    require_private(path)
    return path


def require_private(path: Path) -> None:
    """Raises `StorageError` if the folder `path` is missing or a link, belongs to somebody else, or others may write to it or
    put another one in its place. Creates nothing."""
    try:
        info, parent = path.lstat(), path.parent.stat()
    except OSError as error:
        raise StorageError(
            f"cannot use the folder {path}: {error.strerror}", hint="set EDGE_LLM_HOME to a folder of your own"
        ) from None
    if not stat.S_ISDIR(info.st_mode):
        raise StorageError(
            f"{path} is not a folder of its own (a link or a file)", hint="remove it, or set EDGE_LLM_HOME"
        )
    if os.name != "posix":
        return
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise StorageError(f"{path} can be changed by other users", hint=f"run: chmod 700 {path}, or set EDGE_LLM_HOME")
    if parent.st_uid not in (os.geteuid(), 0):
        raise _replaceable(path)
    _require_fixed(path)


def _require_fixed(path: Path) -> None:
    """Raises `StorageError` if anybody may put another folder or link in the place of `path` or of one that it lies in."""
    linked = False
    for entry in (path, *path.parents[:-1]):
        try:
            folder = entry.parent.stat()
            if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
                raise _replaceable(entry)
            info = entry.lstat()
        except OSError:  # not there yet, or the caller cannot use it
            continue
        # where all may make entries, one that is there belongs to whoever came first
        if folder.st_mode & stat.S_IWOTH and info.st_uid not in (os.geteuid(), 0):
            raise StorageError(f"{entry} belongs to another user", hint="set EDGE_LLM_HOME to a folder of your own")
        linked |= stat.S_ISLNK(info.st_mode) and entry != path
    real = Path(os.path.realpath(path.parent), path.name)
    if linked and real != path:
        _require_fixed(real)


def _replaceable(path: Path) -> StorageError:
    return StorageError(
        f"{path.parent}, which holds {path.name}, can be changed by other users",
        hint=f"run: chmod o-w {path.parent}, or set EDGE_LLM_HOME",
    )
