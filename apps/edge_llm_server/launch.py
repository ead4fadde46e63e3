"""launch: from settings, model folders and an engine's config to a server that answers until it is told to stop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_llm import machine, paths
from edge_llm.config import EngineConfig
from edge_llm.engine.client import EngineClient
from edge_llm.engine.host import EngineHost, usual_bytes
from edge_llm.engine.process_client import ProcessClient
from edge_llm.engine.supervisor import EngineState, Phase
from edge_llm.errors import EdgeLLMError, ParameterError, StorageError
from edge_llm.install.golden import Golden
from edge_llm_server.batches import Batches
from edge_llm_server.cards import ModelCard
from edge_llm_server.exchange import Log
from edge_llm_server.serving import Serving
from edge_llm_server.settings import ServerSettings

_SHARE = 0.75
"""of the memory that is free at the start, for engines"""
Progress = Callable[[str, int, int], None]


def launch(
    settings: ServerSettings,
    folders: Mapping[str, Path | EdgeLLMError],
    config: EngineConfig,
    *,
    note: Callable[[str], None],
    progress: Progress | None = None,
    with_batches: bool = True,
) -> None:
    """Serve until SIGTERM or SIGINT, or until the first model cannot be loaded, which raises its error.

    `folders` are those of the models and the fallback of the settings; each is offered under the name in its manifest. One that
    cannot be used has its error there: under the name that it was asked for by the fallback answers. `note` is given lines
    for whoever started it; without `with_batches` this user's files and batches are left to another server. Raises
    `InputError` for an address that cannot be listened on.
    """
    faults = {Path(model): fault for model, fault in folders.items() if isinstance(fault, EdgeLLMError)}
    cards = {model: ModelCard.read(folder) for model, folder in folders.items() if isinstance(folder, Path)}
    for model, fault in folders.items():
        if isinstance(fault, EdgeLLMError):
            assert settings.fallback is not None, "only then is it let through"
            cards[model] = replace(cards[settings.fallback], name=Path(model).name)
            note(f"{fault}: {settings.fallback} answers for it")
    names = {model: card.name for model, card in cards.items()}
    if len(set(names.values())) < len(names):
        raise ParameterError(f"two models have the same name: {', '.join(sorted(names.values()))}")
    settings = settings.with_options(
        models=tuple(names[model] for model in settings.models),
        fallback=None if settings.fallback is None else names[settings.fallback],
    )

    log = Log()

    def load(folder: Path) -> EngineClient:
        client = ProcessClient(folder, config, on_state=partial(_tell, folder.name, log, progress))
        if client.info.notice:
            note(f"{client.info.name}: {client.info.notice}")
        return client

    def bytes_of(folder: Path) -> int:
        if (fault := faults.get(folder)) is not None:
            raise fault.with_traceback(None)
        return usual_bytes(folder, config)

    places = {names[model]: folder if isinstance(folder, Path) else Path(model) for model, folder in folders.items()}
    host = EngineHost(
        places,
        load,
        bytes_of=bytes_of,
        budget_bytes=_budget(),
        keep_alive_s=math.inf if settings.keep_alive_s is None else settings.keep_alive_s,
    )
    known = {card.name: card for card in cards.values()}
    batches = _batches(host, log, note) if with_batches and not config.private else None
    goldens = (
        {}
        if settings.quality_watch_s is None
        else _goldens({names[model]: folder for model, folder in folders.items() if isinstance(folder, Path)}, note)
    )
    serving = Serving(
        settings,
        host,
        known,
        batches=batches,
        goldens=goldens,
        log=log,
        most_requests=config.slots + config.queue_limit,
    )
    address = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{serving.port}"
    note(f"listening on {address}, loading {settings.models[0]}")
    asyncio.run(serving.run(lambda: note(f"ready: {address}/v1 (Ctrl-C stops)")))


def _batches(host: EngineHost, log: Log, note: Callable[[str], None]) -> Batches | StorageError:
    """Files and batches of this user, unless another server has them or nothing can be written."""
    try:
        return Batches(paths.data_dir() / "batches", host, log)
    except StorageError as error:
        note(f"no files and batches here: {error}")
        return error


def _goldens(folders: Mapping[str, Path], note: Callable[[str], None]) -> dict[str, Golden]:
    """What the models said when they were imported."""
    found = {name: Golden.read(folder) for name, folder in folders.items()}
    for name, golden in found.items():
        if golden is None:
            note(
                f"the quality watch knows nothing of {name}: import it again (edge-llm models rm {name}, then pull it)"
            )
    return {name: golden for name, golden in found.items() if golden is not None}


def _budget() -> int:
    """Bytes that engines may take together."""
    free = machine.available_memory()
    return 1 << 62 if free is None else int(free * _SHARE)


def _tell(model: str, log: Log, progress: Progress | None, state: EngineState) -> None:
    """What an engine's process does: to the log, and while it loads to whoever started the server."""
    if state.phase is Phase.LOADING and state.what:
        if progress is not None:
            progress(state.what, state.done, state.total)
        return
    fault = {} if state.error is None else {"fault": type(state.error).__name__}
    log("engine", model=model, phase=str(state.phase), **fault)
