"""QualityWatch: whether the loaded models still say what they said when they were imported."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from edge_llm.errors import EdgeLLMError, EngineStoppedError, QueueFullError
from edge_llm.install.golden import Golden, drift
from edge_llm_server.api_error import ApiError
from edge_llm_server.engines import Engines
from edge_llm_server.exchange import Log


class QualityWatch:
    """Asks when nobody else waits, and loads nothing for it. `found` is the last divergence of each model, in nats a token;
    infinite where it could not answer."""

    def __init__(self, goldens: Mapping[str, Golden], log: Log) -> None:
        """`goldens` are those of the models that have some, by name."""
        self._goldens, self._log = goldens, log
        self.found: dict[str, float] = {}

    async def run(self, engines: Engines, every_s: float) -> None:
        """From now on, for ever."""
        while True:
            for info in engines.loaded():
                if info.name in self._goldens:
                    await self._check(engines, info.name)
            await asyncio.sleep(every_s)

    async def _check(self, engines: Engines, name: str) -> None:
        try:
            async with engines.use(name) as client:
                if client.info.name != name:
                    return  # the fallback in its stead
                result = await engines.run(drift, self._goldens[name], client)
        except (ApiError, QueueFullError, EngineStoppedError):
            return  # there is too much to do, or it is being loaded: next time
        except EdgeLLMError as error:
            self.found[name] = math.inf
            self._log("quality", model=name, fault=type(error).__name__)
            return
        self.found[name] = result.kl
        self._log("quality", model=name, kl=result.kl, worst_kl=result.worst, as_imported=result.ok)
