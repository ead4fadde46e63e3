"""A session of the static layout over a cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.engine.assembly import cache_geometry
from edge_llm.kernels.layout import TILE, KvType
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.providers import CpuGraph, PluginGraph
from edge_llm.model.static_folder import STATIC_GRAPH
from edge_llm.model.static_session import StaticSession, held_sizes

Provide = Callable[[Mapping[str, int]], CpuGraph | PluginGraph]
"""opens a graph for a cache of these sizes"""


@contextmanager
def opened(
    folder: Path,
    static_folder: Path,
    *,
    context: int,
    max_chunk: int,
    slots: int = 4,
    sinks: int = TILE,
    optimised: bool = True,
    provide: Provide | None = None,
    whole: bool = False,
) -> Iterator[tuple[StaticSession, KVCache]]:
    manifest = ModelManifest.read(folder)
    graph: CpuGraph | PluginGraph

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        return graph.allocate(shape)

    cache = KVCache(
        cache_geometry(manifest),
        slots=slots,
        context=context,
        kv_type=KvType.F32,
        max_chunk=max_chunk,
        sinks=sinks,
        storage=partial(PlainRows, allocate=allocate, whole=whole),
    )
    if provide is None:
        graph = CpuGraph(static_folder / STATIC_GRAPH, threads=1, optimised=optimised)
    else:
        graph = provide(held_sizes(manifest, cache))
    session = StaticSession(folder, static_folder, manifest, graph=graph, cache=cache, max_rows=max_chunk)
    yield session, cache
    session.close()
    cache.check_integrity()
    cache.close()
