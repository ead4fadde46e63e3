"""How a folder or file appears on disk whole or not at all: a lock per name, a staging folder, fsync, one rename.

lock(root, name)          only one process works on a name at a time
  staging(root, name)     root/.<name>.<pid>.<random>.partial, removed on the way out
    ... write ...
    publish(staging, root / name)
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from edge_llm.errors import StorageError
from edge_llm.paths import private_dir

Progress = Callable[[str, int, int], None]
"""called as progress(stage, done, total): what is going on in a word or two, and how far it is, in bytes or steps"""


def quiet(stage: str, done: int, total: int) -> None:
    """A `Progress` that says nothing."""


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def storage_error(error: OSError, where: Path) -> StorageError:
    """`error` as one line that names the folder, with what to do about it."""
    if error.errno in DISK_FULL:
        return StorageError(f"the disk of {where} is full", hint="free some space and run the same command again")
    reason = error.strerror or str(error) or type(error).__name__
    return StorageError(
        f"cannot write to {where}: {reason}", hint="check the folder, or set EDGE_LLM_HOME to another one"
    )


def require_space(folder: Path, needed: int) -> None:
    """Raises `StorageError` when the disk of `folder` has fewer than `needed` bytes free."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # some network disks do not tell; the write itself will
    if free < needed:
        raise StorageError(
            f"not enough disk space in {folder}: {needed / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free",
            hint="free some space, or set EDGE_LLM_HOME to a folder on another disk",
        )


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        # flock, not fcntl locks: those are lost when any descriptor of the file is closed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _open_lock(path: Path) -> int | None:
    """A descriptor holding the lock, or None while somebody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        if _try_lock(descriptor):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.lstat()):
                    return descriptor
            # the holder before us has removed this file: another one may be locked by now
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _release(descriptor: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(descriptor)


@contextlib.contextmanager
def lock(root: Path, name: str, *, on_wait: Callable[[], None] | None = None, poll_s: float = 0.1) -> Iterator[None]:
    """Holds `name` in `root` against other processes and threads; calls `on_wait` once if it must wait for its turn.

    The lock dies with its process. Raises `StorageError` if the folder cannot be written.
    """
    path = private_dir(root) / f".{name}.lock"
    try:
        while (descriptor := _open_lock(path)) is None:
            if on_wait is not None:
                on_wait()
                on_wait = None
            time.sleep(poll_s)
    except OSError as error:
        raise storage_error(error, root) from None
    try:
        yield
    finally:
        _release(descriptor, path)


@contextlib.contextmanager
def held_if_free(root: Path, name: str) -> Iterator[bool]:
    """Whether nobody works on `name` in `root`, which then is held as by `lock`. Waits for nobody."""
    path, descriptor = root / f".{name}.lock", None
    try:
        descriptor = _open_lock(path)
        free = descriptor is not None
    except OSError:
        free = not root.exists()  # whoever worked there would have made it
    try:
        yield free
    finally:
        if descriptor is not None:
            _release(descriptor, path)


def leftovers(root: Path, name: str | None = None) -> Iterator[tuple[str, Path]]:
    """(name, path) of every staging folder or file in `root`, of all names or of one."""
    for path in root.glob(".*.partial"):
        parts = path.name[1:].rsplit(".", 3)
        if len(parts) == 4 and name in (None, parts[0]):
            yield parts[0], path


def discard(path: Path) -> None:
    """Deletes a file or folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(OSError):
            path.chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def staging(root: Path, name: str) -> Iterator[Path]:
    """A new empty 0700 folder beside the final place, removed at the end unless `publish` has moved it away.

    The caller holds `lock(..., name)`; so whatever another staging folder of this name holds was left by a dead
    process.
    """
    private_dir(root)
    for _, leftover in leftovers(root, name):
        discard(leftover)
    folder = root / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.partial"
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise storage_error(error, root) from None
    try:
        yield folder
    finally:
        discard(folder)


def sweep(root: Path) -> None:
    """Removes the staging folders of dead processes, of any name."""
    for name, leftover in leftovers(root):
        with held_if_free(root, name) as free:
            if free:
                discard(leftover)


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(source: Path, target: Path) -> None:
    """Moves a finished file or staging folder to `target` in one rename, replacing what was there.

    The caller holds the lock. Raises `StorageError`; then `target` is what it was before.
    """
    try:
        for part in sorted(source.iterdir()) if source.is_dir() else [source]:
            sync(part)
        if source.is_dir():
            sync(source)
        if target.is_dir() and not target.is_symlink():
            trash = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
            target.rename(trash)
            try:
                source.rename(target)
            except OSError:
                trash.rename(target)
                raise
            discard(trash)
        else:
            source.replace(target)
    except OSError as error:
        raise storage_error(error, target.parent) from None
    with contextlib.suppress(OSError):  # it is there and whole; only a power cut could still take its name back
        sync(target.parent)
