"""The static form of an installed model: derived from its folder when an engine first wants it, kept in the cache folder.

So nobody's disk holds two forms of a model that does not run as both, and what is kept can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge_llm import paths
from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.cache.tiled_rows import LayerGeometry
from edge_llm.errors import ModelFormatError, StorageError
from edge_llm.export.static_graph import write_static
from edge_llm.kernels.layout import KvType
from edge_llm.model.digest_index import DigestIndex
from edge_llm.model.manifest import GRAPH_NAME, WEIGHTS_NAME, ModelManifest
from edge_llm.model.providers import CpuGraph
from edge_llm.model.static_folder import (
    GOLDEN_NAME,
    STATIC_GRAPH,
    STATIC_NAME,
    STATIC_VERSION,
    STATIC_WEIGHTS,
    StaticForm,
    StaticManifest,
)
from edge_llm.model.static_session import StaticSession, golden_logits
from edge_llm.model.verify import FileState, check_files, file_spec, verified_manifest

Progress = Callable[[str, int, int], None]
"""called with (what is going on, done, total)"""

STAGE = "writing the model's static form (once)"
_KEPT = 4
_TEMPORARY_S = 3600
_PARTIAL = ".partial-"


def static_root() -> Path:
    """The folder of all static forms; may not exist yet."""
    return paths.cache_dir() / "static"


def static_form(
    folder: Path, manifest: ModelManifest, form: StaticForm = StaticForm.BLOCKS, progress: Progress | None = None
) -> Path:
    """The static folder of the model in `folder`, written if there is none yet.

    Raises `StorageError` for a disk that cannot take it, `ModelFormatError` for a model that has no static form,
    `IntegrityError` for a damaged one: it would be found for the sound one as well.
    """
    verified_manifest(folder, progress)
    root = paths.private_cache("static")
    target = root / _name(manifest, form)
    with contextlib.suppress(ModelFormatError, OSError):
        _require_whole(target)
        with contextlib.suppress(OSError):  # a folder that cannot be written
            os.utime(target)
        return target
    if progress:
        progress(STAGE, 0, 1)
    try:
        made = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=root))
        try:
            export_static(folder, made, form)
            _publish(made, target)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        _sweep(root, target)
    except OSError as error:
        raise StorageError(
            f"cannot write the static form of the model to {root}: {error.strerror or error}",
            hint="free some space, or set EDGE_LLM_HOME to another disk",
        ) from None
    if progress:
        progress(STAGE, 1, 1)
    return target


def export_static(folder: Path, target: Path, form: StaticForm = StaticForm.BLOCKS) -> StaticManifest:
    """Write the static form of the model in `folder` into the existing folder `target`.

    Its golden logits are those of ONNX Runtime's CPU provider without any optimisation: every weight as float32.
    """
    manifest = ModelManifest.read(folder)
    embedding = write_static(folder, target, form)
    (target / GOLDEN_NAME).write_bytes(b"")
    _write_manifest(target, StaticManifest(form.value, embedding, {}))
    size = manifest.dimensions
    layers = (LayerGeometry(size.kv_heads, size.head_dim, layer.window) for layer in manifest.layers)
    cache = KVCache(
        CacheGeometry(tuple(layers)), slots=1, context=64, kv_type=KvType.F32, max_chunk=64, storage=PlainRows
    )
    graph = CpuGraph(target / STATIC_GRAPH, threads=1, optimised=False)
    session = StaticSession(folder, target, manifest, graph=graph, cache=cache, max_rows=64)
    logits = golden_logits(session, cache)
    session.close()
    (target / GOLDEN_NAME).write_bytes(np.ascontiguousarray(logits, np.float32).tobytes())
    return _write_manifest(target, StaticManifest(form.value, embedding, {}))


def _write_manifest(target: Path, manifest: StaticManifest) -> StaticManifest:
    """static.json, with the sizes and digests that the other files have now."""
    files = {name: file_spec(target / name) for name in (STATIC_GRAPH, STATIC_WEIGHTS, GOLDEN_NAME)}
    manifest = StaticManifest(manifest.form, manifest.embedding, files)
    (target / STATIC_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _require_whole(target: Path) -> None:
    """Raises `ModelFormatError` unless all files of a static folder are those that were written."""
    states = check_files(target, StaticManifest.read(target).files, known=DigestIndex())
    if any(state is not FileState.OK for state in states.values()):
        raise ModelFormatError("the static form of the model is damaged")


def _name(manifest: ModelManifest, form: StaticForm) -> str:
    """Of the static folder of a model: a digest of what it is made from."""
    files = {name: manifest.files[name].sha256 for name in (GRAPH_NAME, WEIGHTS_NAME)}
    shape = repr((manifest.dimensions, manifest.layers, manifest.rope))
    return hashlib.blake2b(json.dumps([STATIC_VERSION, form, files, shape]).encode(), digest_size=16).hexdigest()


def _publish(made: Path, target: Path) -> None:
    """Move it to its place, which another process may have filled meanwhile, or somebody damaged."""
    try:
        _require_whole(target)
    except ModelFormatError:
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(FileExistsError):
            os.rename(made, target)
        StaticManifest.read(target)


def stale(root: Path) -> list[Path]:
    """Folders in the one of all static forms that dead processes have left."""
    old = time.time() - _TEMPORARY_S
    with contextlib.suppress(OSError):  # there is none
        return [p for p in root.iterdir() if p.name.startswith(_PARTIAL) and p.stat().st_mtime < old]
    return []


def _sweep(root: Path, current: Path) -> None:
    """Drop what dead processes left, and the forms that were not used for longest."""
    with contextlib.suppress(OSError):
        entries = sorted((path for path in root.iterdir() if path != current), key=lambda path: path.stat().st_mtime)
        forms = [path for path in entries if not path.name.startswith(_PARTIAL)]
        for path in [*stale(root), *forms[: 1 - _KEPT]]:
            shutil.rmtree(path, ignore_errors=True)
