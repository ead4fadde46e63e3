"""A tiny model of local and global layers over rings so small that they wrap all the time, and what it should say."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edge_llm.cache.kv_cache import KVCache
from edge_llm.engine.assembly import cache_geometry
from edge_llm.kernels.layout import TILE, KvType
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.manifest import GRAPH_NAME, MANIFEST_NAME, FileSpec, LayerSpec, ModelManifest, RopeTable
from edge_llm.model.session import Session
from edge_llm.model.step import Segment, Step
from tests.conftest import export
from tools.tiny_model import write_tiny_gguf

WINDOWS = (40, None, 23)
"""of the layers; local and global ones have each their rope table"""
CONTEXT, MAX_CHUNK = 100, 24
"""so that local rings have 64 rows, and global ones 64 sinks, a window of 36 and 64 rows for it"""
LENGTH = 330
"""three windows and more"""
UNWRAPPED = 4096
"""rows in which no test's ring wraps"""


def write_mixed(folder: Path, windows: Sequence[int | None] = WINDOWS, **sizes: Any) -> Path:
    """Export a tiny model into `folder` and give its layers these windows."""
    folder.mkdir()
    source = write_tiny_gguf(folder / "mixed.gguf", layers=len(windows), **sizes)
    exported = export(source, folder / "exported")
    manifest = ModelManifest.read(exported)
    model: Any = onnx.load(str(exported / GRAPH_NAME), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "RingAttention":
            attributes = {attribute.name: attribute for attribute in node.attribute}
            window = windows[attributes["layer"].i]
            attributes["rope_tables"].i = 2
            if window is not None:
                attributes["window"].i, attributes["rope_table"].i = window, 1
    (rope,) = (info for info in model.graph.input if info.name == "rope")
    rope.type.tensor_type.shape.dim[0].dim_value = 4
    data = model.SerializeToString()
    (exported / GRAPH_NAME).write_bytes(data)
    changed = dataclasses.replace(
        manifest,
        layers=tuple(LayerSpec(rope=0 if window is None else 1, window=window) for window in windows),
        rope=(manifest.rope[0], RopeTable(base=100.0, rotary_dim=manifest.rope[0].rotary_dim)),
        files={**manifest.files, GRAPH_NAME: FileSpec(len(data), hashlib.sha256(data).hexdigest())},
    )
    (exported / MANIFEST_NAME).write_text(changed.to_json())
    return exported


@contextmanager
def opened(
    folder: Path,
    kernels: KernelLibrary,
    kv_type: KvType,
    *,
    slots: int = 4,
    context: int = CONTEXT,
    max_chunk: int = MAX_CHUNK,
    max_rows: int = MAX_CHUNK,
    sinks: int = TILE,
    threads: int = 2,
) -> Iterator[tuple[Session, KVCache]]:
    manifest = ModelManifest.read(folder)
    cache = KVCache(
        cache_geometry(manifest), slots=slots, context=context, kv_type=kv_type, max_chunk=max_chunk, sinks=sinks
    )
    with Session(
        folder,
        manifest,
        kernels=kernels,
        cache_descriptor=cache.descriptor_address,
        max_rows=max_rows,
        threads=threads,
    ) as session:
        yield session, cache
    cache.close()


def recomputed(folder: Path, kernels: KernelLibrary, kv_type: KvType, ids: Sequence[int], **options: int) -> np.ndarray:
    """float32 [len(ids), vocab]: logits of all rows in one step, in a cache with room for them all."""
    room = {"max_chunk": UNWRAPPED, "max_rows": len(ids)}
    with opened(folder, kernels, kv_type, **{**room, **options}) as (session, cache):
        slot = cache.acquire()
        assert slot is not None
        return session.forward(Step((Segment(slot, 0, ids, len(ids)),))).copy()


def append(session: Session, cache: KVCache, slot: int, ids: Sequence[int]) -> np.ndarray:
    """A step of `ids` at the slot's end, committed: the logits of all its rows, valid until the next step."""
    logits = session.forward(Step((Segment(slot, cache.length(slot), ids, len(ids)),)))
    cache.commit(slot, len(ids))
    return logits


def texts(count: int = 3) -> list[list[int]]:
    """Token ids of texts that begin alike: text i leaves the first one at 50 * i."""
    draws = np.random.default_rng(5).integers(4, 300, (count, LENGTH)).tolist()
    return [draws[0][: 50 * i] + draws[i][50 * i :] for i in range(count)]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the prefix that two texts share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
