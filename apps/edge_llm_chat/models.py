"""What models there are to choose from: the installed ones, and those of the catalog that can be fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edge_llm_chat.backend import ModelChoice

_PROGRAM_BYTES = 150_000_000
"""what a process of ours takes beside the weights, roughly"""


def choices() -> list[ModelChoice]:
    """Installed models first. Reads manifests: not for the event loop."""
    from edge_llm.config import default_context
    from edge_llm.engine.assembly import cache_geometry
    from edge_llm.errors import EdgeLLMError
    from edge_llm.install import catalog
    from edge_llm.install.store import ModelStore
    from edge_llm.kernels.layout import KvType
    from edge_llm.model.manifest import ModelManifest

    store = ModelStore()
    found = []
    for name in store.names():
        try:
            manifest = ModelManifest.read(store.path(name))
        except EdgeLLMError:
            continue  # a damaged model is no choice; `edge-llm models list` tells of it
        row = cache_geometry(manifest).row_bytes(KvType[manifest.kv_type.upper()])
        memory = store.size(name) + row * default_context(manifest.dimensions.context, row) + _PROGRAM_BYTES
        size = f"{store.size(name) / 1e6:,.0f} MB installed"
        found.append(ModelChoice(name, _detail(size, memory, manifest.dimensions.context), store.size(name)))
    sources = {store.source_of(name) for name in store.names()}
    for recipe in map(catalog.get, catalog.names()):
        if recipe.source.sha256 not in sources:
            size = f"{recipe.source.download_size / 1e6:,.0f} MB to download, {recipe.license}"
            detail = _detail(size, recipe.source.size + _PROGRAM_BYTES, recipe.context)
            found.append(ModelChoice(recipe.name, detail, recipe.source.size))
    return found


def with_speeds(choices: Sequence[ModelChoice], speeds: Mapping[str, float]) -> list[ModelChoice]:
    """The choices with what each does or would do here; `speeds` are tokens a second of models that have answered, latest first.

    A token takes one pass over the weights, and memory gives so many bytes a second: a model that has not answered yet is as
    much slower as it is larger than one that has. That is an estimate, and says so.
    """
    sizes = {one.name: one.weights for one in choices if one.weights}
    measured = next((name for name in speeds if name in sizes), None)
    told = []
    for one in choices:
        speed = f"{speeds[one.name]:,.0f} tok/s here" if one.name in speeds else ""
        if not speed and measured is not None and one.weights:
            speed = f"perhaps {speeds[measured] * sizes[measured] / one.weights:,.0f} tok/s"
        told.append(replace(one, detail=" · ".join(part for part in (speed, one.detail) if part)))
    return told


def _detail(size: str, memory: int, context: int) -> str:
    return f"{size} · about {memory / 1e6:,.0f} MB of memory · context {context:,}"
