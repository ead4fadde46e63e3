"""open_static: the engine of a model in the static layout, on the provider that was asked for or on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import Progress, intake_and_cache, kv_budget, prefix_store
from edge_llm.engine.core import EngineCore
from edge_llm.errors import SessionError
from edge_llm.kernels.layout import KvType
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.providers import open_graph
from edge_llm.model.static_session import StaticSession, self_test
from edge_llm.sampling.sampler import Kernels


def open_static(
    folder: Path,
    manifest: ModelManifest,
    config: EngineConfig,
    kernels: Kernels,
    threads: int,
    notice: str,
    progress: Progress | None,
) -> EngineCore:
    """The engine of a model folder by stock ops. Its static form is written first if there is none, which `progress` tells.

    A provider that cannot be had, or comes to other logits than were stored, is not used: the CPU is, with a sentence.
    `notice` is the sentence so far. Raises what `open_engine` raises.
    """
    # an installed model has one form; the second is the export's affair, one layer up
    from edge_llm.export.static_export import static_form

    static_folder = static_form(folder, manifest, progress=progress)
    intake, cache = intake_and_cache(folder, manifest, config, kernels, KvType.F32, PlainRows)
    try:
        session, provider, fault = _first_sound(
            ["openvino", "cpu"] if config.provider == "openvino" else ["cpu"],
            lambda name: _session(name, folder, static_folder, manifest, cache, config, threads),
        )
    except BaseException:
        intake.close()
        cache.close()
        raise
    store = prefix_store(manifest, cache, intake.tokenizer.digest, config, ["static", provider])
    return EngineCore(
        session=session,
        cache=cache,
        intake=intake,
        config=config,
        store=store,
        kv_budget=kv_budget(config, cache),
        layout="static",
        provider=provider,
        notice=fault or notice,
    )


def _first_sound(
    names: list[str], opened: Callable[[str], tuple[StaticSession, str]]
) -> tuple[StaticSession, str, str]:
    """(session, provider and device, a sentence if it is not the first's). Raises the last one's `SessionError`."""
    fault = ""
    for name in names[:-1]:
        try:
            return *opened(name), fault
        except SessionError as error:
            fault = f"the CPU computes, for {name} does not: {error}"
    return *opened(names[-1]), fault


def _session(
    name: str,
    folder: Path,
    static_folder: Path,
    manifest: ModelManifest,
    cache: KVCache,
    config: EngineConfig,
    threads: int,
) -> tuple[StaticSession, str]:
    graph, provider = open_graph(name, static_folder, threads=threads)
    session = StaticSession(folder, static_folder, manifest, graph=graph, cache=cache, max_rows=config.max_chunk)
    try:
        self_test(session, cache, static_folder)
    except BaseException:
        session.close()
        raise
    return session, provider
