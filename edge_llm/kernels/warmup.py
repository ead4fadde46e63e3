"""Compiles every kernel ahead of use, keeps the object code, and gives its addresses: the host's only door to the kernels.

The first start on a machine compiles with numba (seconds) and keeps the object code; later starts load it by
`object_loader`, or through llvmlite where that does not know the format (milliseconds, numba is never imported). The kept
file is code that will be run: it lies in a folder of ours that nobody else may write to, is named by a digest of everything
that shaped it, and is checked before use. Anything that does not fit is a miss. Where the cache folder takes nothing, a
folder among the temporary files does.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edge_llm import machine, paths
from edge_llm.errors import KernelError, StorageError
from edge_llm.kernels.object_loader import LoadedCode

ENTRY_MODULES = ("linear", "elementwise", "attention", "sampling", "team", "ort_ops")
"""modules of this package with a table ENTRIES: name -> (signature, function)"""

_OBJECT_FILE = "kernels.bin"
_MAGIC = b"edge_llm kernels 1\n"
_MAX_FILE_BYTES = 64 << 20
_KEPT_LIBRARIES = 4
_TEMPORARY_S = 600
"""age at which a temporary file belongs to nobody any more"""
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")

Progress = Callable[[str, int, int], None]
"""called with (what is compiled, done, total)"""


@dataclass(frozen=True)
class KernelLibrary:
    """Compiled entries by name. Lives as long as the process, for ONNX Runtime may call in at any time."""

    addresses: Mapping[str, int]
    from_cache: bool
    notice: str = ""
    """why the object code is not kept where it should be"""

    def address(self, name: str) -> int:
        """Address of the compiled function `name`; raises `KernelError` if there is none."""
        try:
            return self.addresses[name]
        except KeyError:
            raise KernelError(f"no kernel is called {name!r}") from None


_library: KernelLibrary | None = None
_lock = threading.Lock()
_keep: list[Any] = []  # execution engines and cfuncs: their code must outlive every caller


def load_kernels(progress: Progress | None = None) -> KernelLibrary:
    """The process's kernel library: loaded from the cache, else compiled and kept. Thread-safe.

    Raises `KernelError` if the kernels cannot be compiled here. A cache that cannot be used costs a notice, not a failure.
    """
    global _library  # noqa: PLW0603 - one library a process: ONNX Runtime calls in by address
    with _lock:
        if _library is None:
            try:
                digest = fingerprint()
            except metadata.PackageNotFoundError as error:
                raise KernelError(f"{error.name} is not installed", hint="run: edge-llm doctor") from None
            _library = _kept(digest) or _compile(digest, progress)
        return _library


def cache_state() -> tuple[Path, bool]:
    """The folder that compiled kernels are kept in, and whether it holds those of this machine and version."""
    folder = paths.cache_dir() / "kernels" / fingerprint()
    return folder, (folder / _OBJECT_FILE).is_file()


# --- identity ------------------------------------------------------------------------------------------------------------


def _cpu() -> str:
    """What kernels are compiled for: as the system describes the CPU, else as LLVM does (much slower to ask)."""
    identity = machine.cpu_identity()
    if identity is None:
        import llvmlite.binding as llvm

        identity = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return identity


def fingerprint() -> str:
    """Digest of all that shapes the object code: sources, compilers, interpreter and CPU."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    compilers = [f"{name} {metadata.version(name)}" for name in ("numba", "llvmlite", "numpy")]
    numba_options = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("NUMBA_")]
    digest.update("\n".join([*compilers, *numba_options, _cpu(), sys.version, platform.platform()]).encode())
    return digest.hexdigest()


def _place(digest: str, *, temporary: bool) -> Path:
    """The private folder of a fingerprint, made if need be. Raises `StorageError`; `OSError` if it cannot even be looked up."""
    return paths.private_dir(paths.private_cache("kernels", temporary=temporary) / digest)


def _elsewhere(folder: Path, reason: str) -> str:
    return f"compiled kernels are kept in {folder.parent}: {reason}"


# --- loading -------------------------------------------------------------------------------------------------------------


def _kept(digest: str) -> KernelLibrary | None:
    """The library of a fingerprint, from the cache folder or the one that takes its place. Makes no folders."""
    reason = ""
    for temporary in (False, True):
        try:
            if not (paths.cache_dir(temporary=temporary) / "kernels" / digest).exists():
                continue
            folder = _place(digest, temporary=temporary)
        except (StorageError, OSError) as error:
            reason = reason or str(error)
            continue
        if (library := _load(folder)) is not None:
            reason = reason or paths.obstacle(paths.cache_dir() / "kernels") or ""
            return replace(library, notice=_elsewhere(folder, reason)) if temporary and reason else library
    return None


def _load(folder: Path) -> KernelLibrary | None:
    """The library kept in `folder`, or None if it is missing, damaged, not ours alone, or does not load."""
    try:
        with (folder / _OBJECT_FILE).open("rb") as file:
            info = os.fstat(
                file.fileno()
            )  # a folder that all may look into does not keep them from changing what is in it
            if os.name == "posix" and (info.st_uid != os.geteuid() or info.st_mode & 0o022):
                return None
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError:
        return None
    body = _checked_body(data)
    if body is None:
        return None
    try:
        header_size = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + header_size])
        objects, start = [], 8 + header_size
        for size in header["sizes"]:
            objects.append(body[start : start + size])
            start += size
        addresses = _link(objects, header["symbols"])
    except (RuntimeError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return KernelLibrary(MappingProxyType(addresses), from_cache=True)


def _checked_body(data: bytes) -> bytes | None:
    start = len(_MAGIC) + 32
    if len(data) > _MAX_FILE_BYTES or data[: len(_MAGIC)] != _MAGIC:
        return None
    body = data[start:]
    return body if hashlib.blake2b(body, digest_size=32).digest() == data[len(_MAGIC) : start] else None


def _link(objects: list[bytes], symbols: Mapping[str, str]) -> dict[str, int]:
    """Load object code into this process; the address of each entry's symbol."""
    try:
        code = LoadedCode(objects, _outside)
        found = {name: code.symbols.get(symbol, 0) for name, symbol in symbols.items()}
    except (ValueError, OSError, AttributeError):  # another system or CPU, or one that forbids such memory to us
        code, found = _link_by_llvm(objects, symbols)
    if not found or not all(found.values()):
        raise RuntimeError("a symbol is missing")
    _keep.append(code)
    return found


def _link_by_llvm(objects: list[bytes], symbols: Mapping[str, str]) -> tuple[Any, dict[str, int]]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in _ERROR_SYMBOLS:
        if llvm.address_of_symbol(name) is None:
            llvm.add_symbol(name, _outside(name))
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine()
    )
    for code in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine, {name: engine.get_function_address(symbol) for name, symbol in symbols.items()}


# Object code refers to numba's runtime in error paths that kernels never take: those end the process.
_ERROR_SYMBOLS = (
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_do_raise",
    "numba_unpickle",
    "numba_runtime_build_excinfo_struct",
    "numba_attempt_nocopy_reshape",
    "NRT_incref",
    "NRT_decref",
    "NRT_Free",
    "NRT_MemInfo_call_dtor",
    "NRT_MemInfo_alloc_safe_aligned",
)


def _outside(name: str) -> int:
    """Address of a function of the C library or of Python; `abort` for what only error paths call."""
    library = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
    try:
        function = library.abort if name in _ERROR_SYMBOLS else getattr(library, name)
    except AttributeError:
        raise ValueError(f"object code needs {name}, which this process does not have") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# --- compiling -----------------------------------------------------------------------------------------------------------


def _compile(digest: str, progress: Progress | None) -> KernelLibrary:
    try:
        import numba

        entries: dict[str, tuple[Any, Callable[..., Any]]] = {}
        for module in ENTRY_MODULES:
            entries |= import_module(f"edge_llm.kernels.{module}").ENTRIES
        compiled = {}
        for done, (name, (signature, function)) in enumerate(entries.items()):
            if progress:
                progress(name, done, len(entries))
            compiled[name] = numba.cfunc(signature, error_model="numpy")(function)
    except Exception as error:  # whatever the compiler raises, the caller needs to know one thing
        raise KernelError(
            f"the kernels cannot be compiled for this machine: {error}", hint="run: edge-llm doctor"
        ) from error
    if progress:
        progress("", len(entries), len(entries))
    _keep.extend(compiled.values())
    objects = [kernel._library._get_compiled_object() for kernel in compiled.values()]
    notice = _keep_for_later(digest, objects, {name: kernel.native_name for name, kernel in compiled.items()})
    addresses = {name: int(kernel.address) for name, kernel in compiled.items()}
    return KernelLibrary(MappingProxyType(addresses), from_cache=False, notice=notice)


def _keep_for_later(digest: str, objects: list[bytes], symbols: Mapping[str, str]) -> str:
    """Keep object code for the next start; what to say if that is not where it should be. Never fails."""
    reason = ""
    for temporary in (False, True):
        try:
            folder = _place(digest, temporary=temporary)
            _store(folder, objects, symbols)
        except (StorageError, OSError) as error:
            reason = reason or str(error)
        else:
            return _elsewhere(folder, reason) if temporary else ""
    return f"compiled kernels are not kept, so every start compiles them again: {reason}"


def _store(folder: Path, objects: list[bytes], symbols: Mapping[str, str]) -> None:
    """Write object code, whole or not at all. Raises `StorageError`."""
    header = json.dumps({"symbols": dict(symbols), "sizes": [len(code) for code in objects]}).encode()
    body = len(header).to_bytes(8, "little") + header + b"".join(objects)
    data = _MAGIC + hashlib.blake2b(body, digest_size=32).digest() + body
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            temporary = file.name
            file.write(data)
        os.replace(temporary, folder / _OBJECT_FILE)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise StorageError(f"{folder} takes nothing: {error.strerror}") from None
    _sweep(folder)


def stale(root: Path) -> list[Path]:
    """Temporary files in the folder of all libraries that dead processes have left."""
    found, old = [], time.time() - _TEMPORARY_S
    with contextlib.suppress(OSError):  # there is none
        for folder in root.iterdir():
            if _FINGERPRINT.fullmatch(folder.name) and not folder.is_symlink():
                found += [p for p in folder.iterdir() if p.name != _OBJECT_FILE and p.lstat().st_mtime < old]
    return found


def _sweep(current: Path) -> None:
    """Drop temporaries of processes that died, and the libraries of versions long gone; a few stay, for several
    interpreters may share the folder."""
    with contextlib.suppress(OSError):
        for path in stale(current.parent):
            path.unlink()
        others = sorted(
            (path for path in current.parent.iterdir() if path != current and _FINGERPRINT.fullmatch(path.name)),
            key=lambda path: path.stat().st_mtime,
        )
        for path in others[:-_KEPT_LIBRARIES]:
            shutil.rmtree(path, ignore_errors=True)
