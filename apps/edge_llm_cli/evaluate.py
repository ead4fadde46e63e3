"""`edge-llm eval`: how good an imported model is on a text."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from edge_llm.errors import InputError
from edge_llm_cli import answer, console
from edge_llm_cli.models import JsonOption
from edge_llm_cli.progress import ProgressDisplay


def evaluate(
    model: Annotated[str, typer.Argument(help="Name of a model, its folder, or a FILE.gguf.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="A text file in UTF-8.")],
    reference: Annotated[
        str | None, typer.Option(metavar="f32", help="Compare with the source's weights in fp32.")
    ] = None,
    kv_dtype: answer.KvOption = None,
    provider: answer.ProviderOption = None,
    window: Annotated[int, typer.Option(help="Tokens that are read from an empty context.")] = 512,
    threads: answer.ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Perplexity of a model on a text, and with --reference f32 how close it is to the unrounded weights."""
    if reference not in (None, "f32"):
        raise InputError(f"--reference can only be f32, not {reference}")
    content = _read_text(text)

    from edge_llm import machine
    from edge_llm.config import default_threads, load_config
    from edge_llm.engine.assembly import cache_geometry
    from edge_llm.export import evaluation
    from edge_llm.install.importer import resolve
    from edge_llm.kernels.layout import KvType
    from edge_llm.kernels.warmup import load_kernels
    from edge_llm.model.manifest import TOKENIZER_NAME, ModelManifest
    from edge_llm.text.tokenizer import Tokenizer

    config = load_config(kv_type=kv_dtype, threads=threads, provider=provider)
    static = config.layout == "static" or config.provider not in ("auto", "cpu")
    with _ended_by_sigterm(), ProgressDisplay() as progress:
        folder = resolve(model, progress)
        manifest = ModelManifest.read(folder)
        kernels = load_kernels(progress.kernels)
        if kernels.notice:
            console.note(kernels.notice)
        result = evaluation.evaluate(
            folder,
            Tokenizer.from_file(folder / TOKENIZER_NAME).encode_raw(content),
            kernels=kernels,
            geometry=cache_geometry(manifest),
            kv_type=KvType[(config.kv_type or manifest.kv_type).upper()],
            threads=min(config.threads or default_threads(), len(machine.usable_cpus())),
            window=window,
            reference=reference is not None,
            provider=None if not static else config.provider.replace("auto", "cpu"),
            progress=lambda _stage, done, total: progress("evaluating", done, total),
        )
    values = {name: value for name, value in dataclasses.asdict(result).items() if value is not None}
    if as_json:
        console.data(values)
    else:
        console.table([(name, f"{value:.6g}") for name, value in values.items()])


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the program by an exception meanwhile, so that nothing large is left in the temporary folder; a second one
    ends it at once. One that is ignored (nohup) stays so."""

    def leave(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text", hint="convert it first") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path and its rights") from None
