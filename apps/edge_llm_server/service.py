"""Service: what the routes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_llm.engine.info import EngineInfo
from edge_llm.errors import StorageError
from edge_llm.install.golden import MOST_KL
from edge_llm_server.batches import Batches
from edge_llm_server.cards import ModelCard
from edge_llm_server.engines import Engines
from edge_llm_server.exchange import RequestCounts
from edge_llm_server.settings import ServerSettings


@dataclass(frozen=True)
class Service:
    """The settings, the engines, what is told of each model, and what was answered."""

    settings: ServerSettings
    engines: Engines
    cards: Mapping[str, ModelCard]
    batches: Batches | StorageError | None = None
    """None: nothing is to be kept; an error: nothing can be"""
    counts: RequestCounts = field(default_factory=RequestCounts)
    quality: Mapping[str, float] = field(default_factory=dict)
    """of models, what the quality watch has found"""

    def notice(self, info: EngineInfo) -> str:
        """What whoever talks with this model should know of it; empty: nothing."""
        drifted = self.quality.get(info.name, 0.0) > MOST_KL
        strange = f"{info.name} no longer says what it said when it was imported" if drifted else ""
        return "; ".join(part for part in (info.chat_notice, strange) if part)
