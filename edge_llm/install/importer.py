"""From a name or a file to a model folder that is whole: pull, import and the lookup that `run -m` and friends use."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from edge_llm import paths
from edge_llm.errors import InputError, IntegrityError, ModelFormatError, ModelNotFoundError, StorageError, quoted
from edge_llm.install import catalog, staging
from edge_llm.install.catalog import Recipe
from edge_llm.install.staging import Progress, quiet
from edge_llm.install.store import ModelStore, check_name, is_model_name
from edge_llm.model.digest_index import DigestIndex
from edge_llm.model.manifest import MANIFEST_NAME
from edge_llm.model.verify import require_intact, verify

WAITING = "waiting for another process that is installing this model"
"""stage reported once by a call that must wait for its turn"""

GENERIC_SAMPLING = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
"""for a file that nobody recommends anything for: plain sampling (temperature 1, no filter) lets small models derail"""


def resolve(
    model: str, progress: Progress = quiet, *, allow_download: bool = True, store: ModelStore | None = None
) -> Path:
    """Folder of `model`: an installed name, a catalog name (then pulled), a model folder, or a FILE.gguf (imported).

    A text with a path separator or ending in .gguf is a path; any other is looked up as a name first. The sizes of
    the folder's files are checked, their digests where it is loaded. Raises `ModelNotFoundError` with the closest names,
    `InputError` and its kinds for a model that cannot be used, `DownloadError`.
    """
    store = store or ModelStore()
    path = Path(model)
    if model.lower().endswith(".gguf"):
        return import_file(path, progress, store=store)
    if is_model_name(model):
        if store.has(model):
            return require_intact(store.path(model))
        if catalog.has(model):
            if not allow_download:
                raise ModelNotFoundError(f"the model {model} is not installed", hint=f"edge-llm pull {model}")
            return pull(model, progress, store=store)
    if model and (path / MANIFEST_NAME).is_file():
        return require_intact(path.resolve())
    _refuse_hub(model)
    if model and path.exists():
        raise ModelFormatError(
            f"{model} is neither a model folder nor a .gguf file",
            hint="give a FILE.gguf, or a folder that `edge-llm import` made",
        )
    raise catalog.unknown_model(model, [*store.names(), *catalog.names()])


def _refuse_hub(model: str) -> None:
    if model.startswith("hf:"):
        raise InputError(
            "models of the Hugging Face hub cannot be fetched",
            hint="download the GGUF there, then: edge-llm import FILE.gguf",
        )


def pull(name: str, progress: Progress = quiet, *, store: ModelStore | None = None) -> Path:
    """Folder of the catalog model `name`, fetched and imported unless it is installed and intact already.

    Several processes at once do the work once. The download is deleted after the import, or when the disk is full. A licence
    with an address is told before the download, as a stage "licence: ...".
    """
    from edge_llm.install.pull import discard, fetch  # its networking costs a start that needs none

    _refuse_hub(name)
    if name.lower().endswith(".gguf"):
        raise InputError(f"{quoted(name)} is a file, not a name", hint="edge-llm import FILE.gguf")
    recipe = catalog.get(name)
    store = store or ModelStore()
    with store.lock(name, on_wait=lambda: progress(WAITING, 0, 0)):
        if _is_intact(store, name):
            return store.path(name)
        staging.sweep(store.root)
        if recipe.license_url:
            progress(f"licence: {name} comes under the {recipe.license}, {recipe.license_url}", 0, 0)
        try:
            gguf = fetch(recipe, progress)
            folder = import_model(gguf, name, progress, sha256=recipe.source.sha256, recipe=recipe, store=store)
        except StorageError:
            discard(recipe)
            raise
        discard(recipe)
        return folder


def import_file(
    source: Path, progress: Progress = quiet, *, name: str | None = None, store: ModelStore | None = None
) -> Path:
    """Folder of the model in a GGUF file, imported unless a model from the same bytes is in the store already.

    Without `name` the model is called after the file and the first 8 digits of its sha256, and any installed model of
    the same source will do. With `name` it is stored under it. Raises `InputError` if that name is taken by another
    source; one of the catalog is for the file of its recipe, which then need not be pulled.
    """
    store = store or ModelStore()
    pinned = catalog.get(name).source if name is not None and catalog.has(check_name(name)) else None
    sha256 = _source_sha256(source, progress)
    if pinned is not None and sha256 != pinned.sha256:
        raise InputError(
            f"{name} is a model of the catalog, and {source.name} is not its file ({pinned.file}, sha256 {pinned.sha256})",
            hint="choose another name with --name",
        )
    if name is None:
        name = store.find_source(sha256) or _derived_name(source, sha256)
        if _is_intact(store, name):  # so that a store that cannot be written can be used
            return store.path(name)
    with store.lock(name, on_wait=lambda: progress(WAITING, 0, 0)):
        if store.source_of(name) not in (None, sha256):
            raise InputError(
                f"another model is called {name}", hint=f"choose another --name, or: edge-llm models rm {name}"
            )
        if _is_intact(store, name):
            return store.path(name)
        staging.sweep(store.root)
        recipe = catalog.of_source(sha256)  # a known file is given what is known of it, under any name
        return import_model(source, name, progress, sha256=sha256, recipe=recipe, store=store)


def import_model(
    source: Path,
    name: str,
    progress: Progress = quiet,
    *,
    sha256: str,
    recipe: Recipe | None = None,
    store: ModelStore | None = None,
) -> Path:
    """Exports the GGUF `source`, whose digest is `sha256`, into the store as `name`; gives the folder.

    The caller holds the store's lock of `name`. What was written is read back and compared before the folder appears in
    one rename; on any error nothing of it stays. Raises `InputError` and its kinds.
    """
    from edge_llm.export.exporter import export_gguf
    from edge_llm.install import golden  # an engine, which a start that imports nothing loads itself

    def report(stage: str, done: int, total: int) -> None:
        progress(f"importing {stage}", done, total)

    store = store or ModelStore()
    before = _require_regular(source)
    options = {"sampling": GENERIC_SAMPLING} if recipe is None else _options(recipe)
    paths.private_dir(store.root)
    # a byte for a code of 5 or 6 bits is half as much again; the rest is tokenizer, graph and slack
    staging.require_space(store.root, before.st_size + before.st_size // 2 + (32 << 20))
    try:
        with staging.staging(store.root, name) as folder:
            export_gguf(source, folder, name=name, source_sha256=sha256, progress=report, **options)
            if not _unchanged(before, source.stat()):
                raise IntegrityError(f"{source.name} changed while it was imported", hint="run the same command again")
            require_intact(folder, progress, digests=True)
            golden.record(folder, progress)
            staging.publish(folder, store.path(name))
    except OSError as error:
        raise staging.storage_error(error, store.root) from None
    return store.path(name)


def _options(recipe: Recipe) -> dict[str, Any]:
    names = ("sampling", "system_prompt", "quality", "kv_type", "license")
    return {name: getattr(recipe, name) for name in names}


def _unchanged(before: os.stat_result, after: os.stat_result) -> bool:
    names = ("st_size", "st_mtime_ns", "st_ino", "st_dev")
    return all(getattr(before, name) == getattr(after, name) for name in names)


def _is_intact(store: ModelStore, name: str) -> bool:
    if not store.has(name):
        return False
    try:
        return verify(store.path(name), known=DigestIndex()).ok
    except ModelFormatError:
        return False


def _require_regular(source: Path) -> os.stat_result:
    try:
        info = source.stat()
    except (OSError, ValueError):
        raise ModelNotFoundError(f"there is no file {source}", hint="check the path") from None
    if not stat.S_ISREG(info.st_mode):
        raise ModelFormatError(f"{source} is not a regular file", hint="give the path of a .gguf file")
    return info


def _source_sha256(source: Path, progress: Progress) -> str:
    """Digest of a GGUF file, remembered while its size, times and inode stay the same."""
    info = _require_regular(source)
    try:
        with source.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFormatError(
                    f"{source.name} is not a GGUF file", hint="only models in the GGUF format can be imported"
                )
            return DigestIndex().sha256(file, lambda done: progress("reading", done, info.st_size))
    except OSError as error:
        raise StorageError(f"cannot read {source}: {error.strerror}", hint="check the file's permissions") from None


def _derived_name(source: Path, sha256: str) -> str:
    stem = re.sub(r"[^a-z0-9._-]+", "-", source.stem.lower()).strip("-._")[:80]
    return f"{stem or 'model'}-{sha256[:8]}"
