"""verify(folder): whether the files of a model folder are the ones that its manifest promises."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from edge_llm.errors import IntegrityError
from edge_llm.model.digest import file_sha256
from edge_llm.model.digest_index import DigestIndex
from edge_llm.model.manifest import GOLDEN_NAME, MANIFEST_NAME, FileSpec, ModelManifest

Progress = Callable[[str, int, int], None]
"""called with (what is going on, bytes done, bytes in all)"""


class FileState(StrEnum):
    OK = "ok"
    MISSING = "missing"
    NOT_A_FILE = "not a regular file"
    WRONG_SIZE = "wrong size"
    WRONG_DIGEST = "wrong sha256"
    UNREADABLE = "cannot be read"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found in one model folder. `complete` is False when only sizes were compared."""

    name: str
    folder: Path
    files: dict[str, FileState]
    extra: tuple[str, ...]
    """names that the manifest does not list; they are never read"""
    complete: bool

    @property
    def ok(self) -> bool:
        """Whether every promised file is there and right. Extra files do no harm."""
        return all(state is FileState.OK for state in self.files.values())

    def summary(self) -> str:
        """One line: `ok`, or the faults."""
        faults = [f"{name}: {state}" for name, state in self.files.items() if state is not FileState.OK]
        return "; ".join(faults) or ("ok" if self.complete else "ok (sizes)")

    def raise_if_damaged(self) -> None:
        """Raises `IntegrityError` naming the faults, if there are any."""
        if not self.ok:
            raise IntegrityError(
                f"the model {self.name} is damaged ({self.summary()})",
                hint=f"import or install it again; its folder is {self.folder}",
            )


def verify(
    folder: Path, progress: Progress | None = None, *, digests: bool = True, known: DigestIndex | None = None
) -> VerifyReport:
    """Compares every file with the manifest: its size, and with `digests` also its sha256. What is `known` is not read again.

    Raises `ModelFormatError` if there is no sound manifest.
    """
    return _report(folder, ModelManifest.read(folder), progress, digests=digests, known=known)


def _report(
    folder: Path, manifest: ModelManifest, progress: Progress | None, *, digests: bool, known: DigestIndex | None
) -> VerifyReport:
    files = check_files(folder, manifest.files, progress, digests=digests, known=known)
    listed = {*manifest.files, MANIFEST_NAME, GOLDEN_NAME}
    extra: tuple[str, ...] = ()
    with contextlib.suppress(OSError):  # a folder may forbid to list what may be read
        extra = tuple(sorted(entry.name for entry in folder.iterdir() if entry.name not in listed))
    return VerifyReport(manifest.name, folder, files, extra, digests)


def require_intact(folder: Path, progress: Progress | None = None, *, digests: bool = False) -> Path:
    """`folder` itself. Raises `IntegrityError` naming the faults that `verify` finds."""
    verify(folder, progress, digests=digests).raise_if_damaged()
    return folder


def verified_manifest(folder: Path, progress: Progress | None = None) -> ModelManifest:
    """The manifest of a folder whose files are what it says, by their digests; those that were read before in this state are
    not read again. Raises `ModelFormatError` and `IntegrityError`."""
    manifest = ModelManifest.read(folder)
    _report(folder, manifest, progress, digests=True, known=DigestIndex()).raise_if_damaged()
    return manifest


def check_files(
    folder: Path,
    files: Mapping[str, FileSpec],
    progress: Progress | None = None,
    *,
    digests: bool = True,
    known: DigestIndex | None = None,
) -> dict[str, FileState]:
    """What each of these files of a folder is, compared as `verify` does."""
    total, done, found = sum(spec.size for spec in files.values()), 0, {}
    for name, spec in files.items():
        advance = None if progress is None else partial(_advance, progress, done, total)
        found[name] = _check_file(folder / name, spec, digests, known, advance)
        done += spec.size
    return found


def file_spec(path: Path) -> FileSpec:
    """What a file is now, for a later `check_files`."""
    with path.open("rb") as file:
        return FileSpec(os.fstat(file.fileno()).st_size, file_sha256(file))


def _advance(progress: Progress, base: int, total: int, step: int) -> None:
    progress("checking", base + step, total)


def _check_file(
    path: Path, spec: FileSpec, digests: bool, known: DigestIndex | None, advance: Callable[[int], None] | None
) -> FileState:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return FileState.NOT_A_FILE
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != spec.size:
                return FileState.WRONG_SIZE
            if digests and (known.sha256 if known else file_sha256)(file, advance) != spec.sha256:
                return FileState.WRONG_DIGEST
    except FileNotFoundError:
        return FileState.MISSING
    except OSError:
        return FileState.UNREADABLE
    return FileState.OK
