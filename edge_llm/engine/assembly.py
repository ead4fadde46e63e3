"""open_engine: from a model folder and a config to an engine that can run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from edge_llm import machine
from edge_llm.cache.block_file import BlockFormat
from edge_llm.cache.block_folder import prefix_folder
from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.prefix_store import PrefixStore
from edge_llm.cache.tiled_rows import LayerGeometry
from edge_llm.config import EngineConfig, default_context, default_threads
from edge_llm.engine.core import EngineCore
from edge_llm.engine.intake import Intake
from edge_llm.engine.window import ContextWindow
from edge_llm.errors import ParameterError, StorageError
from edge_llm.kernels.layout import CACHE_VERSION, KvType
from edge_llm.kernels.warmup import fingerprint as kernel_fingerprint
from edge_llm.kernels.warmup import load_kernels
from edge_llm.model.manifest import GRAPH_NAME, WEIGHTS_NAME, ModelManifest
from edge_llm.model.session import Session
from edge_llm.sampling.sampler import Sampler

_PARKED = 4
"""slots for conversations that do not run: parked ones, and ended ones until somebody goes on with them"""

Progress = Callable[[str, int, int], None]
"""called with (what is going on, done, total)"""


def open_engine(folder: Path, config: EngineConfig, progress: Progress | None = None) -> EngineCore:
    """The engine of a model folder.

    Kernels that this machine has not seen are compiled first, which `progress` tells. Raises `ModelFormatError`,
    `ParameterError` for a config that the model cannot follow, `KernelError` and `SessionError`.
    """
    manifest = ModelManifest.read(folder)
    geometry = cache_geometry(manifest)
    kv_type = KvType.INT8 if (config.kv_type or manifest.kv_type) == "int8" else KvType.F32
    context = _context(config, manifest, geometry.row_bytes(kv_type))
    free = machine.available_memory()
    kernels = load_kernels(progress)
    window = ContextWindow(context)
    intake = Intake.open(
        folder,
        manifest,
        sampler=Sampler(kernels, manifest.dimensions.vocab),
        window=window,
        policy=config.context_policy,
        speculates=config.speculation != "off",
    )
    cache = KVCache(
        geometry,
        slots=config.slots + _PARKED,
        context=context,
        kv_type=kv_type,
        max_chunk=config.max_chunk,
        sinks=window.sinks,
    )
    session = Session(
        folder,
        manifest,
        kernels=kernels,
        cache_descriptor=cache.descriptor_address,
        max_rows=config.max_chunk,
        threads=min(config.threads or default_threads(), len(machine.usable_cpus())),
    )
    store = _prefix_store(manifest, cache, intake.tokenizer.digest, config) if config.stores_prefixes else None
    budget = _kv_budget(config, free, cache)
    return EngineCore(session=session, cache=cache, intake=intake, config=config, store=store, kv_budget=budget)


def cache_geometry(manifest: ModelManifest) -> CacheGeometry:
    """What the model's layers keep of each token."""
    size = manifest.dimensions
    return CacheGeometry(tuple(LayerGeometry(size.kv_heads, size.head_dim, layer.window) for layer in manifest.layers))


def _prefix_store(
    manifest: ModelManifest, cache: KVCache, tokenizer_digest: str, config: EngineConfig
) -> PrefixStore | None:
    """Files for what the cache holds, or None where there is no folder for them: then prompts are read again."""
    files = {name: spec.sha256 for name, spec in manifest.files.items() if name in (GRAPH_NAME, WEIGHTS_NAME)}
    model = [files, tokenizer_digest, manifest.layout, repr((manifest.dimensions, manifest.layers, manifest.rope))]
    bits = [cache.kv_type.name, CACHE_VERSION, kernel_fingerprint(), metadata.version("onnxruntime")]
    fingerprint = hashlib.blake2b(json.dumps([model, bits], sort_keys=True).encode(), digest_size=32).hexdigest()
    form = BlockFormat(fingerprint, cache.snapshot_shapes(1))
    try:
        return PrefixStore(prefix_folder(), form, budget=config.prefix_cache_bytes)
    except StorageError:
        return None


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


def _kv_budget(config: EngineConfig, free: int | None, cache: KVCache) -> int | None:
    """Bytes that the cache may hold, `free` ones of memory being there before it; at least one whole conversation's."""
    whole, budget = cache.bytes_of(cache.limit), config.kv_budget_bytes
    if budget is None:
        return None if free is None else max(whole, free // 2)
    if budget < whole:
        raise ParameterError(
            f"kv_budget_bytes is {budget}, but a conversation that fills the context of {cache.context} tokens takes {whole}",
            hint="raise it, or lower the context",
        )
    return budget
