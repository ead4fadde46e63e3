"""`edge-llm batch`: a file of requests to a file of answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from edge_llm.errors import InputError, ParameterError, StorageError
from edge_llm.sampling.params import USUAL_MAX_TOKENS
from edge_llm_cli import answer

if TYPE_CHECKING:
    from edge_llm_batch.results import Results
    from edge_llm_batch.run import BatchRun
    from edge_llm_batch.task import Task

STREAM = "-"


def batch(
    input_file: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one a line; - is standard input.")],
    output_file: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="Their answers; one that exists is gone on with. - is stdout.")
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Name of a model, its folder, or a FILE.gguf.")
    ] = answer.DEFAULT_MODEL,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Answer lines that name another model too, with this one.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer whose line names no limit.")
    ] = USUAL_MAX_TOKENS,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Answer only the I-th of N parts of the input.")] = "1/1",
    slots: Annotated[int | None, answer.engine_option(help="Requests that are answered at the same time.")] = None,
    context: answer.ContextOption = None,
    context_policy: answer.PolicyOption = None,
    threads: answer.ThreadsOption = None,
    kv_dtype: answer.KvOption = None,
    cache: answer.SeldomCacheOption = None,
    speculate: answer.SpeculateOption = None,
    private: answer.PrivateOption = False,
    on: Annotated[
        str | None,
        typer.Option("--engine", metavar="ray", help="Answer on the machines of a Ray cluster, or of a local one."),
    ] = None,
    workers: Annotated[int, typer.Option(help="With --engine ray: processes that each load the model.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format. Started again after any end, it goes on where it was.

    Exit code 1 if lines were answered with an error.
    """
    from edge_llm_batch.endpoints import ENDPOINTS, Defaults
    from edge_llm_batch.lines import LineId, Shard, Survey, check_done, read_lines
    from edge_llm_batch.run import BatchRun
    from edge_llm_batch.task import read_tasks

    from edge_llm_cli.batch_report import BatchReport

    part = Shard.parse(shard)
    if max_tokens < 1:
        raise ParameterError(f"--max-tokens must be at least 1, not {max_tokens}")
    if as_json and str(output_file) == STREAM:
        raise ParameterError("--json and the answers cannot both go to stdout", hint="give an output file")
    if on not in (None, "ray"):
        raise ParameterError(f"--engine must be ray, or left out, not {on!r}")
    if workers < 1:
        raise ParameterError(f"--workers must be at least 1, not {workers}")
    if on == "ray" and str(input_file) == STREAM:
        raise ParameterError("the workers of --engine ray read the input themselves", hint="give an input file")
    options = answer.EngineOptions(
        context,
        threads,
        kv_dtype,
        context_policy,
        cache=cache,
        private=private,
        speculation=speculate,
        slots=slots,
        usual_cache="memory",
    )
    _refuse_one_file_for_both(input_file, output_file)
    with _opened_input(input_file) as source, _opened_output(output_file) as results:
        report = BatchReport(results)
        with report.told_at_the_end(as_json=as_json), answer.opened(model, options) as (engine, _):
            info = engine.info
            # what answers depend on beside their lines: what was done in another job is not gone on with
            computed = [info.layout, info.provider, info.kv_type]
            others = [info.name, info.tokenizer_digest, *computed, max_tokens, any_model, context, context_policy]
            job = hashlib.blake2b(json.dumps(others).encode(), digest_size=32).digest()
            known = None
            if source.seekable():
                start = source.tell()
                known = Survey.of(read_lines(source, job), part, results.done)
                source.seek(start)

            def wanted(line: LineId) -> bool:
                return not check_done(line, results.done) and part.has(line)

            report.begin(known, info.name)
            defaults = Defaults(None if any_model else model, max_tokens)
            if on == "ray":
                engine.close()  # it has said what it is; the workers load their own
                from edge_llm_batch.ray_run import run_on_ray

                opened = partial(answer.opened, model, options)
                run_on_ray(
                    str(input_file.resolve()), job, wanted, (opened, defaults), results, report.show, workers=workers
                )
            else:
                import asyncio  # it brings ssl, and no other verb needs either

                tasks = read_tasks(read_lines(source, job), ENDPOINTS, wanted)
                asyncio.run(_answer(BatchRun(engine, results, defaults, report.show), tasks))
    if report.errors:
        raise typer.Exit(1)


async def _answer(run: BatchRun, tasks: Iterable[Task]) -> None:
    """Reads the input on a thread of its own: a stream may keep it waiting, and requests run meanwhile."""
    from edge_llm_batch.pool import TaskPool

    pool = TaskPool()
    threading.Thread(target=pool.fill, args=(tasks,), name="edge-llm batch input", daemon=True).start()
    try:
        await run.run(pool)
    finally:
        pool.close()


def _refuse_one_file_for_both(input_file: Path, output_file: Path) -> None:
    """Raises `InputError` where answers would be added to the requests that are being read."""
    try:
        source, target = (
            os.fstat(number) if str(path) == STREAM else path.stat()
            for number, path in ((0, input_file), (1, output_file))
        )
    except OSError:  # one is not there yet, or opening it will say more
        return
    if stat.S_ISREG(source.st_mode) and os.path.samestat(source, target):
        name = input_file if str(input_file) != STREAM else output_file
        raise InputError(
            f"{'standard input' if str(name) == STREAM else name} cannot be both the input and the output of a batch",
            hint="give the answers a file of their own, for example answers.jsonl",
        )


@contextlib.contextmanager
def _opened_input(path: Path) -> Iterator[BinaryIO]:
    if str(path) == STREAM:
        # not sys.stdin, and never closed: a thread may still wait in it, and whoever closes it would wait for that
        yield open(0, "rb", closefd=False)  # noqa: SIM115 - as said
        return
    try:
        file = path.open("rb")
    except OSError as error:
        hint = "give a file of requests, a line of JSON each; - is standard input"
        raise StorageError(f"{path}: {error.strerror or error}", hint=hint) from error
    with file:
        yield file


@contextlib.contextmanager
def _opened_output(path: Path) -> Iterator[Results]:
    from edge_llm_batch.results import ResultStream, open_results

    with contextlib.closing(ResultStream(sys.stdout.buffer) if str(path) == STREAM else open_results(path)) as results:
        yield results
