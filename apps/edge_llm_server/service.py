"""Service: what the routes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from edge_llm_server.engines import Engines
from edge_llm_server.settings import ServerSettings


@dataclass(frozen=True)
class Service:
    """The settings, the engines, and since when (Unix time)."""

    settings: ServerSettings
    engines: Engines
    started: int = field(default_factory=lambda: int(time.time()))
