"""ModelStore: the models that are installed on this machine, one folder a model under the data folder."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from edge_llm import paths
from edge_llm.errors import InputError, ModelFormatError, ModelNotFoundError, StorageError, quoted
from edge_llm.install import staging
from edge_llm.model.manifest import MANIFEST_NAME, ModelManifest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def is_model_name(text: str) -> bool:
    """Whether `text` can be the name of a model: one plain path segment on every system."""
    return _NAME.fullmatch(text) is not None and _RESERVED.fullmatch(text) is None and not text.endswith(".")


def check_name(name: str) -> str:
    """`name` itself. Raises `InputError` unless it is a plain word that is safe as a folder's name everywhere."""
    if not is_model_name(name):
        raise InputError(
            f"{quoted(name)} cannot be the name of a model",
            hint="use letters, digits, '.', '_' and '-', at most 100, a letter or digit first",
        )
    return name


class ModelStore:
    """Installed models by name. Reading creates nothing; a model is either whole or not there."""

    def __init__(self, root: Path | None = None) -> None:
        """`root` holds the folders of the models; default `models` in the data folder."""
        self.root = paths.data_dir() / "models" if root is None else root

    def path(self, name: str) -> Path:
        """Where the model `name` is, or would be."""
        return self.root / check_name(name)

    def names(self) -> list[str]:
        """Names of the installed models, sorted. Raises `StorageError` for a folder of models that cannot be read."""
        try:
            entries = sorted(entry.name for entry in self.root.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(error) from None
        return [name for name in entries if self.has(name)]

    def has(self, name: str) -> bool:
        """Whether there is a model of this name, sound or not: `ModelManifest.read` says so. Raises as `names`."""
        if not is_model_name(name):
            return False
        try:
            (self.root / name / MANIFEST_NAME).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # it is there, and not ours to look into; or that holds for all of them
            try:
                (self.root / name).lstat()
            except OSError as error:
                raise self._unreadable(error) from None
        return True

    def _unreadable(self, error: OSError) -> StorageError:
        reason = paths.obstacle(self.root) if isinstance(error, NotADirectoryError) else error.strerror
        return StorageError(
            f"the models in {self.root} cannot be read: {reason}",
            hint="check who owns it and what its rights are, or set EDGE_LLM_HOME to another folder",
        )

    def source_of(self, name: str) -> str | None:
        """Digest of the file that `name` was imported from; None if it is not installed or its manifest cannot be read."""
        try:
            return ModelManifest.read(self.path(name)).source.sha256
        except ModelFormatError:
            return None

    def find_source(self, sha256: str) -> str | None:
        """Name of a model that was imported from the file with this digest."""
        return next((name for name in self.names() if self.source_of(name) == sha256), None)

    def size(self, name: str) -> int:
        """Bytes on disk, as far as they can be seen."""
        size, folder = 0, self.path(name)
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                size += entry.lstat().st_size
        return size

    def remove(self, name: str) -> int:
        """Deletes a model and gives the bytes freed. Raises `ModelNotFoundError`, `StorageError`."""
        folder = self.path(name)
        with self.lock(name):
            if not folder.is_dir() or folder.is_symlink():
                raise ModelNotFoundError(f"no model {name} is installed", hint="edge-llm models list shows what is")
            with contextlib.suppress(OSError):  # not every file system has rights
                folder.chmod(0o700)  # one without them could neither be measured nor moved nor emptied
            freed = self.size(name)
            try:
                # out of sight first: a model that is half deleted must not be found
                with staging.staging(self.root, name) as trash:
                    folder.rename(trash / name)
                    shutil.rmtree(trash / name)
            except OSError as error:
                raise staging.storage_error(error, self.root) from None
        return freed

    @contextlib.contextmanager
    def lock(self, name: str, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Holds `name` against other processes that install or remove it."""
        paths.private_dir(self.root.parent)
        with staging.lock(self.root, check_name(name), on_wait=on_wait):
            yield
