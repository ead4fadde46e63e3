"""What models there are to choose from: the installed ones, and those of the catalog that can be fetched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """`size` is bytes on disk, or of the download; `memory` an estimate of what it takes to run, in bytes."""

    name: str
    size: int
    context: int | None
    installed: bool
    memory: int
    license: str = ""

    @property
    def detail(self) -> str:
        what = "installed" if self.installed else "to download"
        parts = [f"{self.size / 1e6:,.0f} MB {what}", f"about {self.memory / 1e6:,.0f} MB of memory"]
        parts += [f"context {self.context:,}"] if self.context else []
        return " · ".join([*parts, *([self.license] if self.license and not self.installed else [])])


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
        row = cache_geometry(manifest).row_bytes(KvType.INT8 if manifest.kv_type == "int8" else KvType.F32)
        memory = store.size(name) + row * default_context(manifest.dimensions.context, row) + _PROGRAM_BYTES
        found.append(ModelChoice(name, store.size(name), manifest.dimensions.context, True, memory))
    sources = {store.source_of(name) for name in store.names()}
    for recipe in map(catalog.get, catalog.names()):
        if recipe.source.sha256 not in sources:
            memory = recipe.source.size + _PROGRAM_BYTES
            size = recipe.source.download_size
            found.append(ModelChoice(recipe.name, size, recipe.context, False, memory, recipe.license))
    return found
