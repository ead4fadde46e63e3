"""open_static: the engine of a model in the static layout, on one provider."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import (
    Progress,
    energy_meter,
    kv_budget,
    open_draft_model,
    open_intake,
    prefix_store,
    told,
    window_and_cache,
)
from edge_llm.engine.core import EngineCore
from edge_llm.engine.intake import Intake
from edge_llm.errors import SessionError, UnsupportedModelError
from edge_llm.kernels.layout import KvType
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.plugins import PLUGINS, forget_compiled, form_for, needs_fixed_sizes
from edge_llm.model.providers import CpuGraph, PluginGraph, open_graph, provider_state
from edge_llm.model.static_session import StaticSession, held_sizes, self_test
from edge_llm.sampling.sampler import Kernels


def open_static(
    folder: Path,
    manifest: ModelManifest,
    config: EngineConfig,
    kernels: Kernels,
    threads: int,
    *,
    provider: str,
    notices: list[str],
    progress: Progress | None,
) -> EngineCore:
    """The engine of a model folder by stock ops. Its static form is written first if there is none, which `progress` tells.

    Raises `SessionError` if the provider cannot be had, or does not come to the logits that were stored; `StorageError`,
    and what `open_engine` raises for a model and its config.
    """
    # an installed model has one form; the second is the export's affair, one layer up
    from edge_llm.export.static_export import static_form

    if provider in PLUGINS:
        provider_state(provider)  # before anything large is written for it
    try:
        static_folder = static_form(folder, manifest, form_for(provider), progress)
    except UnsupportedModelError as error:
        raise SessionError(str(error)) from error
    if progress and provider in PLUGINS:
        progress(f"compiling for {provider}", 0, 0)
    opened = partial(_opened, folder, static_folder, manifest, config, kernels, threads, provider, notices, progress)
    try:
        session, intake, cache, budget = opened()
    except SessionError:
        if not forget_compiled(provider, static_folder):
            raise
        # what was compiled before may be at fault: once more, from the graph
        session, intake, cache, budget = opened()
    return EngineCore(
        session=session,
        cache=cache,
        intake=intake,
        config=config,
        store=prefix_store(manifest, cache, intake.tokenizer.digest, config, ["static", provider], notices),
        kv_budget=budget,
        energy=energy_meter(config),
        layout="static",
        provider=provider,
        notice=told(notices),
    )


def _opened(
    folder: Path,
    static_folder: Path,
    manifest: ModelManifest,
    config: EngineConfig,
    kernels: Kernels,
    threads: int,
    provider: str,
    notices: list[str],
    progress: Progress | None,
) -> tuple[StaticSession, Intake, KVCache, int | None]:
    """A session that has passed its self-test, and what belongs to it, with the bytes that its cache may come to hold."""
    graph: CpuGraph | PluginGraph | None = None

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        assert graph is not None  # the cache takes no memory before its first row
        return graph.allocate(shape)

    storage = partial(PlainRows, allocate=allocate, whole=needs_fixed_sizes(provider))
    draft_model = open_draft_model(manifest, config, kernels, threads, notices, progress)
    with ExitStack() as opened:  # all or none
        if draft_model is not None:
            opened.callback(draft_model.close)
        window, cache = window_and_cache(manifest, config, KvType.F32, storage)
        opened.callback(cache.close)
        budget = kv_budget(config, cache, draft_model)
        intake = open_intake(folder, manifest, config, kernels, window, draft_model)
        opened.callback(intake.close)
        graph = open_graph(provider, static_folder, threads=threads, held=held_sizes(manifest, cache))
        opened.callback(graph.close)
        session = StaticSession(folder, static_folder, manifest, graph=graph, cache=cache, max_rows=config.max_chunk)
        self_test(session, cache, static_folder)
        opened.pop_all()
    return session, intake, cache, budget
