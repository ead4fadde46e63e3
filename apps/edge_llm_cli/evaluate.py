"""`edge-llm eval`: how good an imported model is on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_llm_cli.models import JsonOption


def evaluate(
    model: Annotated[str, typer.Argument(help="Name of a model, its folder, or a FILE.gguf.")],
    text: Annotated[Path, typer.Option(help="A text file in UTF-8.")],
    reference: Annotated[str | None, typer.Option(help="f32: compare with the source's weights in fp32.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="How keys and values are kept: int8 or f32.")] = None,
    window: Annotated[int, typer.Option(help="Tokens that are read from an empty context.")] = 512,
    threads: Annotated[int | None, typer.Option(help="Threads that compute; default: one a physical core.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Perplexity of a model on a text, and with --reference f32 how close it is to the unrounded weights."""
    raise NotImplementedError
