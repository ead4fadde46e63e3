"""launch: from settings, model folders and an engine's config to a server that answers until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import Progress, open_engine
from edge_llm.engine.client import EngineClient, ThreadClient
from edge_llm.errors import ParameterError
from edge_llm_server.cards import ModelCard
from edge_llm_server.local_host import LocalHost
from edge_llm_server.serving import Serving
from edge_llm_server.settings import ServerSettings


def launch(
    settings: ServerSettings,
    folders: Mapping[str, Path],
    config: EngineConfig,
    *,
    note: Callable[[str], None],
    progress: Progress | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until the first model cannot be loaded, which raises its error.

    `folders` are those of the models and the fallback of the settings; each is offered under the name in its manifest.
    `note` is given lines for whoever started it. Raises `InputError` for an address that cannot be listened on.
    """
    cards = {model: ModelCard.read(folder) for model, folder in folders.items()}
    names = {model: card.name for model, card in cards.items()}
    if len(set(names.values())) < len(names):
        raise ParameterError(f"two models have the same name: {', '.join(sorted(names.values()))}")
    settings = settings.with_options(
        models=tuple(names[model] for model in settings.models),
        fallback=None if settings.fallback is None else names[settings.fallback],
    )

    def load(folder: Path) -> EngineClient:
        return ThreadClient(open_engine(folder, config, progress))

    host = LocalHost({names[model]: folder for model, folder in folders.items()}, load)
    known = {card.name: card for card in cards.values()}
    serving = Serving(settings, host, known, most_requests=config.slots + config.queue_limit)
    address = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{serving.port}"
    note(f"listening on {address}, loading {settings.models[0]}")
    asyncio.run(serving.run(lambda: note(f"ready: {address}/v1 (Ctrl-C stops)")))
