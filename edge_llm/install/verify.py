"""verify(folder): whether the files of a model folder are the ones that its manifest promises."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from edge_llm.errors import IntegrityError
from edge_llm.install.digest import file_sha256
from edge_llm.install.staging import Progress, quiet
from edge_llm.model.manifest import GOLDEN_NAME, MANIFEST_NAME, FileSpec, ModelManifest


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


def verify(folder: Path, progress: Progress = quiet, *, digests: bool = True) -> VerifyReport:
    """Compares every file with the manifest: its size, and with `digests` also its sha256.

    Raises `ModelFormatError` if there is no sound manifest.
    """
    manifest = ModelManifest.read(folder)
    total = sum(spec.size for spec in manifest.files.values())
    done = 0
    files = {}
    for name, spec in manifest.files.items():
        files[name] = _check_file(folder / name, spec, digests, partial(_advance, progress, done, total))
        done += spec.size
    listed = {*manifest.files, MANIFEST_NAME, GOLDEN_NAME}
    extra = tuple(sorted(entry.name for entry in folder.iterdir() if entry.name not in listed))
    return VerifyReport(manifest.name, folder, files, extra, digests)


def require_intact(folder: Path, progress: Progress = quiet, *, digests: bool = False) -> Path:
    """`folder` itself. Raises `IntegrityError` naming the faults that `verify` finds."""
    verify(folder, progress, digests=digests).raise_if_damaged()
    return folder


def _advance(progress: Progress, base: int, total: int, step: int) -> None:
    progress("checking", base + step, total)


def _check_file(path: Path, spec: FileSpec, digests: bool, advance: Callable[[int], None]) -> FileState:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return FileState.NOT_A_FILE
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != spec.size:
                return FileState.WRONG_SIZE
            if digests and file_sha256(file, advance) != spec.sha256:
                return FileState.WRONG_DIGEST
    except FileNotFoundError:
        return FileState.MISSING
    except OSError:
        return FileState.UNREADABLE
    return FileState.OK
