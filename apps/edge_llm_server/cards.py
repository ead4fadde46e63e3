"""ModelCard: what is told of a model whether it is loaded or not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from edge_llm.model.manifest import MANIFEST_NAME, ModelManifest


@dataclass(frozen=True, slots=True)
class ModelCard:
    """From a model's manifest. `modified` is Unix time; `digest` that of the file it was imported from."""

    name: str
    digest: str
    size: int
    architecture: str
    parameters: int
    types: tuple[str, ...]
    """of its matrices, the most frequent first"""
    context: int
    """the trained one, in tokens"""
    embedding: int
    chats: bool
    thinks: bool
    """whether it has a reasoning channel"""
    modified: float
    license: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises `ModelFormatError`."""
        manifest = ModelManifest.read(folder)
        types = manifest.source.tensor_types
        return cls(
            name=manifest.name,
            digest=manifest.source.sha256,
            size=sum(spec.size for spec in manifest.files.values()),
            architecture=manifest.architecture,
            parameters=manifest.parameters,
            types=tuple(sorted(types, key=lambda kind: -types[kind])),
            context=manifest.dimensions.context,
            embedding=manifest.dimensions.hidden,
            chats=manifest.has_chat_template,
            thinks=bool(manifest.reasoning),
            modified=(folder / MANIFEST_NAME).stat().st_mtime,
            license=manifest.license,
        )

    @property
    def modified_at(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.modified))

    @property
    def capabilities(self) -> list[str]:
        """What Ollama's clients ask before they offer it."""
        return ["completion", *(["tools"] if self.chats else []), *(["thinking"] if self.thinks else [])]

    @property
    def parameter_size(self) -> str:
        """As people write it: 135M, 1.7B."""
        if self.parameters >= 10**9:
            return f"{self.parameters / 1e9:.1f}B"
        return f"{self.parameters / 1e6:.0f}M"

    @property
    def details(self) -> dict[str, Any]:
        """Ollama's `details`."""
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.architecture,
            "families": [self.architecture],
            "parameter_size": self.parameter_size,
            "quantization_level": self.types[0] if self.types else "unknown",
        }
