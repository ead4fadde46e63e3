"""`edge-llm serve`: models behind an HTTP address, for the clients of OpenAI's API, llama-server's and Ollama's."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_llm.errors import (
    DownloadError,
    EdgeLLMError,
    InputError,
    IntegrityError,
    ModelFormatError,
    ParameterError,
    StorageError,
)
from edge_llm_cli import answer, console
from edge_llm_cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from edge_llm_server.keys import ApiKey


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Name of a model, its folder, or a FILE.gguf; repeatable, the first answers who names none.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; another than this machine's own needs keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="Port to listen on; 0 is any that is free.")] = 8080,
    uds: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Unix socket to listen on as well; default: one in the runtime folder."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Who may ask: a file with a line NAME KEY each, which only its owner may read."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name by which clients call this server; repeatable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A web page that may use this server; repeatable.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(metavar="N", help="Most requests of one key in a minute; default: any number.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens computed for one key in a minute; default: any number.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(metavar="N", help="Most requests of one key at the same time; default: any number.")
    ] = None,
    keep_alive: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Unload a model that nobody has asked for so long; default: never."),
    ] = None,
    fallback: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that answers where the wanted one cannot be loaded.")
    ] = None,
    quality_watch: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help="Every so often (0.01 to 8760) compare what the models say with what they said at import; default: never.",
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long answers may go on after SIGTERM or Ctrl-C.")
    ] = 10.0,
    slots: Annotated[
        int | None,
        answer.engine_option(metavar="N", help="Conversations that are answered at the same time; default: 8."),
    ] = None,
    context: answer.ContextOption = None,
    threads: answer.ThreadsOption = None,
    provider: answer.ProviderOption = None,
    kv_dtype: answer.KvOption = None,
    cache: answer.SeldomCacheOption = None,
    speculate: answer.SpeculateOption = None,
    private: Annotated[
        bool, answer.kept_option("--private", help="Keep nothing on disk; files and batches are refused.")
    ] = False,
) -> None:
    """Answer over HTTP until SIGTERM or Ctrl-C: OpenAI's API under /v1, Ollama's under /api."""
    _require_server()
    if quality_watch is not None and not 0.01 <= quality_watch <= 8760:
        raise ParameterError(f"--quality-watch must be between 0.01 and 8760 hours, not {quality_watch:g}")
    from edge_llm_server.launch import launch
    from edge_llm_server.settings import ServerSettings
    from edge_llm_server.sockets import tcp_socket

    from edge_llm.config import load_config
    from edge_llm.install.importer import resolve
    from edge_llm.paths import server_socket

    options = answer.EngineOptions(context, threads, kv_dtype, cache=cache, private=private)
    config = load_config(
        defaults={"prefix_cache": "memory"},
        slots=slots,
        context=context,
        threads=threads,
        kv_type=kv_dtype,
        prefix_cache=options.prefix_cache,
        private=private or None,
        provider=provider,
        speculation=speculate,
    )
    settings = ServerSettings(
        models=tuple(model or [answer.DEFAULT_MODEL]),
        host=host,
        port=port,
        uds=uds or server_socket(),
        keys=_keys(keys),
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        keep_alive_s=keep_alive,
        fallback=fallback,
        grace_s=grace,
        quality_watch_s=None if quality_watch is None else quality_watch * 3600,
    )
    if port:
        tcp_socket(host, port).close()  # one that is taken is told of now, and not after a download
    with ProgressDisplay() as progress:
        folders: dict[str, Path | EdgeLLMError] = {}
        for name in dict.fromkeys((*settings.models, *([fallback] if fallback else ()))):
            try:
                folders[name] = resolve(name, progress)
            except (ModelFormatError, IntegrityError, StorageError, DownloadError) as error:
                if fallback in (None, name):
                    raise
                folders[name] = error
        if config.draft_model is not None:
            resolve(config.draft_model, progress)  # fetched now, where it is seen
        launch(settings, folders, config, note=console.note, progress=progress)


def _require_server() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "pydantic") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"the server needs {', '.join(missing)}", hint='pip install "edge-llm[server]"')


def _keys(path: Path | None) -> tuple[ApiKey, ...]:
    """Keys of the file, else of the environment."""
    from edge_llm_server.keys import ENVIRONMENT, keys_of_environment, read_keys

    if path is not None:
        return read_keys(path)
    text = os.environ.pop(ENVIRONMENT, None)  # nothing that this process starts needs to know them
    return () if text is None else keys_of_environment(text)
