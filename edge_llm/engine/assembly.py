"""open_engine: from a model folder and a config to an engine that can run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

from edge_llm import machine, paths
from edge_llm.cache.block_file import BlockFormat
from edge_llm.cache.block_folder import prefix_folder
from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.prefix_store import PrefixStore
from edge_llm.cache.snapshot import LayerRows
from edge_llm.cache.tiled_rows import LayerGeometry, TiledRows
from edge_llm.config import MOST_DEFAULT_CONTEXT, EngineConfig, default_context, default_threads
from edge_llm.engine.core import EngineCore
from edge_llm.engine.draft_model import CHUNK, SLOTS, DraftModel
from edge_llm.engine.energy import EnergyMeter, find_source
from edge_llm.engine.intake import Intake
from edge_llm.engine.meanwhile import Meanwhile
from edge_llm.engine.window import ContextWindow
from edge_llm.errors import KernelError, ParameterError, SessionError, StorageError
from edge_llm.kernels.layout import CACHE_VERSION, KvType
from edge_llm.kernels.warmup import KernelLibrary, load_kernels
from edge_llm.kernels.warmup import fingerprint as kernel_fingerprint
from edge_llm.model.manifest import GRAPH_NAME, TOKENIZER_NAME, WEIGHTS_NAME, ModelManifest
from edge_llm.model.session import Session
from edge_llm.model.verify import verified_manifest
from edge_llm.sampling.sampler import Kernels, Sampler

_PARKED = 4
"""slots for conversations that do not run: parked ones, and ended ones until somebody goes on with them"""

_MOST_DRAFT_COST = 0.75
"""steps of the model: for more than this a draft gains nothing even if all are right"""

COMPILING = "compiling kernels (once)"
Progress = Callable[[str, int, int], None]
"""called with (what is going on, done, total)"""


def open_engine(folder: Path, config: EngineConfig, progress: Progress | None = None) -> EngineCore:
    """The engine of a model folder: in the ring layout, or where that is not asked for or cannot run in the static one.

    A folder that was not seen in this state is compared with its manifest first, for what is cached is found by the digests
    there. Kernels that this machine has not seen are compiled, and a static form that it has not is written. `progress` tells
    all of it. Raises `ModelFormatError`, `IntegrityError` for a damaged model, `ParameterError` for a config that the model
    cannot follow, `StorageError`, `KernelError` and `SessionError`.
    """
    manifest = verified_manifest(folder, progress)
    threads = min(config.threads or default_threads(), len(machine.usable_cpus()))
    kernels, missing = _kernels(progress)
    notices = [kernels.notice] if isinstance(kernels, KernelLibrary) and kernels.notice else []
    if config.provider not in ("auto", "cpu"):
        try:
            return _static_engine(folder, manifest, config, kernels, threads, config.provider, notices, progress)
        except SessionError as error:
            hint = f" ({error.hint})" if error.hint else ""
            notices.append(f"the CPU computes, not {config.provider}: {error}{hint}")
    if config.layout != "static":
        try:
            if missing is not None:
                raise missing
            return _ring_engine(folder, manifest, config, kernels, threads, notices, progress)
        except (KernelError, SessionError) as error:
            if config.layout == "ring":
                raise
            notices.append(f"the fast kernels do not run here, slower stock ops do: {error}")
    return _static_engine(folder, manifest, config, kernels, threads, "cpu", notices, progress)


def _kernels(progress: Progress | None) -> tuple[Kernels, KernelError | None]:
    """Compiled kernels, or the plain ones that sampling can do with and why."""
    try:
        return load_kernels(progress and (lambda _name, done, total: progress(COMPILING, done, total))), None
    except KernelError as error:
        from edge_llm.sampling.plain_kernel import PlainKernels

        return PlainKernels(), error


@machine.without_collections()
def _ring_engine(
    folder: Path,
    manifest: ModelManifest,
    config: EngineConfig,
    kernels: Kernels,
    threads: int,
    notices: list[str],
    progress: Progress | None,
) -> EngineCore:
    kv_type = KvType[(config.kv_type or manifest.kv_type).upper()]
    draft_model = open_draft_model(manifest, config, kernels, threads, notices, progress)
    with ExitStack() as opened:  # all or none
        if draft_model is not None:
            opened.callback(draft_model.close)
        window, cache = window_and_cache(manifest, config, kv_type)
        opened.callback(cache.close)
        budget = kv_budget(config, cache, draft_model)
        loading = Meanwhile(  # ONNX Runtime reads the graph while Python reads the tokenizer
            lambda: Session(
                folder,
                manifest,
                kernels=kernels,
                cache_descriptor=cache.descriptor_address,
                max_rows=config.max_chunk,
                threads=threads,
                takes_turns=draft_model is not None,
                spin_us=config.spin_us,
            )
        )
        opened.callback(loading.close)
        intake = open_intake(folder, manifest, config, kernels, window, draft_model)
        opened.callback(intake.close)
        session = loading.result()
        bits = [CACHE_VERSION, kernel_fingerprint()]
        store = prefix_store(manifest, cache, intake.tokenizer.digest, config, [manifest.layout, *bits], notices)
        if store is not None:
            opened.callback(store.close)
        core = EngineCore(
            session=session,
            cache=cache,
            intake=intake,
            config=config,
            store=store,
            kv_budget=budget,
            energy=energy_meter(config),
            notice=told(notices),
        )
        opened.pop_all()
        return core


def _static_engine(
    folder: Path,
    manifest: ModelManifest,
    config: EngineConfig,
    kernels: Kernels,
    threads: int,
    provider: str,
    notices: list[str],
    progress: Progress | None,
) -> EngineCore:
    from edge_llm.engine.static import open_static  # what it needs costs a start that does not need it

    return open_static(
        folder, manifest, config, kernels, threads, provider=provider, notices=notices, progress=progress
    )


def window_and_cache(
    manifest: ModelManifest,
    config: EngineConfig,
    kv_type: KvType,
    storage: Callable[..., LayerRows] = TiledRows,
) -> tuple[ContextWindow, KVCache]:
    """Raises `ParameterError` for a config that the model cannot follow."""
    geometry = cache_geometry(manifest)
    window = ContextWindow(_context(config, manifest, geometry.row_bytes(kv_type)))
    cache = KVCache(
        geometry,
        slots=config.slots + _PARKED,
        context=window.context,
        kv_type=kv_type,
        max_chunk=config.max_chunk,
        sinks=window.sinks,
        storage=storage,
    )
    return window, cache


def open_intake(
    folder: Path,
    manifest: ModelManifest,
    config: EngineConfig,
    kernels: Kernels,
    window: ContextWindow,
    draft_model: DraftModel | None,
) -> Intake:
    """The intake, which owns the `draft_model`. Raises as `Intake.open`."""
    return Intake.open(
        folder,
        manifest,
        sampler=Sampler(kernels, manifest.dimensions.vocab),
        window=window,
        policy=config.context_policy,
        speculates=config.speculation != "off",
        draft_model=draft_model,
    )


def open_draft_model(
    manifest: ModelManifest,
    config: EngineConfig,
    kernels: Kernels,
    threads: int,
    notices: list[str],
    progress: Progress | None,
) -> DraftModel | None:
    """The model that the config wants drafts of, in the ring layout; None if it wants none, or they cannot be had here, which
    goes to `notices`. Raises `ParameterError` for one with another tokenizer, and what `resolve`, `verified_manifest`
    and `Session` raise."""
    if config.draft_model is None:
        return None
    if not isinstance(kernels, KernelLibrary):
        notices.append(f"there are no drafts of {config.draft_model}: the fast kernels do not run here")
        return None
    folder = draft_folder(config.draft_model, progress)
    draft = verified_manifest(folder, progress)
    if draft.files[TOKENIZER_NAME].sha256 != manifest.files[TOKENIZER_NAME].sha256:
        raise ParameterError(
            f"{draft.name} cannot draft for {manifest.name}: they have different tokenizers",
            hint="take a smaller model of the same family",
        )
    # where weights are not waited for, products are
    cost = max(draft.weight_bytes / manifest.weight_bytes, draft.parameters / manifest.parameters)
    if cost > _MOST_DRAFT_COST:
        notices.append(f"the draft model {draft.name} is too large to make {manifest.name} faster, and hardly tried")
    cache = KVCache(
        cache_geometry(draft),
        slots=SLOTS,
        context=min(config.context or MOST_DEFAULT_CONTEXT, draft.dimensions.context),
        kv_type=KvType[draft.kv_type.upper()],
        max_chunk=CHUNK,
    )
    try:
        session = Session(
            folder,
            draft,
            kernels=kernels,
            cache_descriptor=cache.descriptor_address,
            max_rows=CHUNK,
            threads=threads,
            takes_turns=True,
            spin_us=config.spin_us,
        )
    except BaseException:
        cache.close()
        raise
    vocab = min(draft.dimensions.vocab, manifest.dimensions.vocab)
    return DraftModel(
        session=session,
        cache=cache,
        sampler=Sampler(kernels, vocab),
        vocab=vocab,
        cost=cost,
        keeps=config.prefix_cache != "off",
    )


def draft_folder(model: str, progress: Progress | None = None) -> Path:
    """Folder of a draft model, by any name that `Engine.load` takes."""
    from edge_llm.install.importer import resolve  # names are the affair of the layer above

    return resolve(model, progress) if progress else resolve(model)


def told(notices: list[str]) -> str:
    """What an engine has to say about itself."""
    return "; ".join(dict.fromkeys(notices))  # what was tried twice has said it twice


def cache_geometry(manifest: ModelManifest) -> CacheGeometry:
    """What the model's layers keep of each token."""
    size = manifest.dimensions
    return CacheGeometry(tuple(LayerGeometry(size.kv_heads, size.head_dim, layer.window) for layer in manifest.layers))


def prefix_store(
    manifest: ModelManifest,
    cache: KVCache,
    tokenizer_digest: str,
    config: EngineConfig,
    layout: list[object],
    notices: list[str],
) -> PrefixStore | None:
    """Files for what the cache holds, if the config wants them and there is a folder; else prompts are read again, which goes
    to `notices`. `layout` is whatever else shapes the rows.
    """
    if not config.stores_prefixes:
        return None
    files = {name: spec.sha256 for name, spec in manifest.files.items() if name in (GRAPH_NAME, WEIGHTS_NAME)}
    model = [files, tokenizer_digest, repr((manifest.dimensions, manifest.layers, manifest.rope))]
    bits = [cache.kv_type.name, metadata.version("onnxruntime"), layout]
    fingerprint = hashlib.blake2b(json.dumps([model, bits], sort_keys=True).encode(), digest_size=32).hexdigest()
    form = BlockFormat(fingerprint, cache.snapshot_shapes(1))
    folder = prefix_folder()
    store, reason = None, paths.obstacle(folder)
    try:
        store = PrefixStore(folder, form, budget=config.prefix_cache_bytes)  # what is there can be read all the same
    except StorageError as error:
        reason = reason or str(error)
    if reason is not None:
        notices.append(f"what is read is not kept for the next start: {reason}")
    return store


def _context(config: EngineConfig, manifest: ModelManifest, row_bytes: int) -> int:
    trained = manifest.dimensions.context
    if config.context is None:
        return default_context(trained, row_bytes)
    if config.context > trained:
        raise ParameterError(
            f"a context of {config.context} tokens is more than the {trained} that {manifest.name} was trained for",
            hint=f"ask for at most {trained}",
        )
    return config.context


def energy_meter(config: EngineConfig) -> EnergyMeter | None:
    """What tells how much energy steps take, if anything does."""
    source = find_source(config.watts)
    return None if source is None else EnergyMeter(source)


def kv_budget(config: EngineConfig, cache: KVCache, draft_model: DraftModel | None) -> int | None:
    """Bytes that empty caches may come to hold: half of what is free, but at least one whole conversation's."""
    whole, budget = cache.bytes_of(cache.limit), config.kv_budget_bytes
    if draft_model is not None:
        whole += draft_model.bytes_of(cache.limit)
    free = machine.available_memory()
    if budget is None:
        return None if free is None else max(whole, free // 2)
    if budget < whole:
        raise ParameterError(
            f"kv_budget_bytes is {budget}, but a conversation that fills the context of {cache.context} tokens takes {whole}",
            hint="raise it, or lower the context",
        )
    return budget
