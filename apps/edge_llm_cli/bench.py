"""`edge-llm bench`: how fast a model is here, in llama-bench's terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_llm.errors import ParameterError
from edge_llm_cli import answer, console
from edge_llm_cli.models import JsonOption
from edge_llm_cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from edge_llm.engine.benchmark import Benchmark

_MOST_TOKENS, _MOST_REPETITIONS = 1 << 24, 1000


@dataclass(frozen=True, slots=True)
class Test:
    """Reading a prompt of `prompt` tokens, or else generating `generated` ones, after `depth` that are there already."""

    prompt: int
    generated: int
    depth: int

    @property
    def name(self) -> str:
        name = f"pp{self.prompt}" if self.prompt else f"tg{self.generated}"
        return f"{name} @ d{self.depth}" if self.depth else name

    @property
    def tokens(self) -> int:
        return self.prompt or self.generated

    def measure(self, benchmark: Benchmark) -> float:
        """Tokens a second."""
        seconds = benchmark.prefill if self.prompt else benchmark.decode
        return self.tokens / seconds(self.depth, self.tokens)


def bench(
    model: Annotated[str, typer.Argument(help="Name of a model, its folder, or a FILE.gguf.")] = answer.DEFAULT_MODEL,
    prompt: Annotated[str, typer.Option("-p", "--n-prompt", help="Tokens of prompt to read; 0: none.")] = "512",
    generate: Annotated[str, typer.Option("-n", "--n-gen", help="Tokens to generate; 0: none.")] = "128",
    depth: Annotated[str, typer.Option("-d", "--n-depth", help="Tokens that are in the context before.")] = "0",
    threads: Annotated[int | None, typer.Option("-t", "--threads", help="Default: one a physical core.")] = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="How often each test is measured.")] = 5,
    provider: answer.ProviderOption = None,
    kv_dtype: answer.KvOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure reading prompts (pp) and generating (tg) as llama-bench does. -p, -n and -d take several, with commas.

    Tokens are random and only the model is measured: no sampling, no text, no cache.
    """
    repetitions = _number("-r", str(repetitions), 1, _MOST_REPETITIONS)
    tests = list(_tests(prompt, generate, depth))
    if not tests:
        raise ParameterError("there is nothing to measure", hint="give -p or -n a number above 0")

    import numpy as np

    from edge_llm import machine
    from edge_llm.config import default_threads, load_config
    from edge_llm.engine.assembly import open_engine
    from edge_llm.engine.benchmark import Benchmark
    from edge_llm.install.importer import resolve

    room = max(test.depth + test.tokens for test in tests)
    config = load_config(
        threads=threads,
        kv_type=kv_dtype,
        context=room,
        slots=1,
        prefix_cache="off",
        speculation="off",
        provider=provider,
    )
    results = []
    with ProgressDisplay() as progress:
        core = open_engine(resolve(model, progress), config, progress)
        try:
            manifest = core.intake.manifest
            ids = np.random.default_rng(0).integers(0, manifest.dimensions.vocab, room).tolist()
            benchmark = Benchmark(core, ids)
            for done, test in enumerate(tests):
                progress("measuring", done, len(tests))
                test.measure(benchmark)  # the first time is not measured: pages and shapes are new
                results.append(_result(test, [test.measure(benchmark) for _ in range(repetitions)]))
        finally:
            core.close()
    facts = {
        "model": manifest.name,
        "threads": min(config.threads or default_threads(), len(machine.usable_cpus())),
        "kv_type": core.cache.kv_type.name.lower(),
    }
    if core.info.layout != manifest.layout:
        facts |= {"provider": core.info.provider, "layout": core.info.layout}
    if core.info.notice:
        console.note(core.info.notice)
    if as_json:
        console.data({**facts, "repetitions": repetitions, "results": results})
        return
    rows = [(*facts, "test", "tokens/s")]
    values = tuple(map(str, facts.values()))
    console.table(rows + [(*values, r["test"], f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}") for r in results])


def _tests(prompt: str, generate: str, depth: str) -> Iterator[Test]:
    """All that the options ask for, each depth in turn: so that no context is computed twice."""
    prompts, generated = _numbers("-p", prompt), _numbers("-n", generate)
    for tokens in sorted(_numbers("-d", depth)):
        yield from (Test(count, 0, tokens) for count in prompts if count)
        yield from (Test(0, count, tokens) for count in generated if count)


def _numbers(option: str, text: str) -> list[int]:
    return [_number(option, word, 0, _MOST_TOKENS) for word in text.split(",")]


def _number(option: str, word: str, low: int, high: int) -> int:
    if not word.strip().isdecimal() or not low <= int(word) <= high:
        raise ParameterError(f"{option} takes whole numbers from {low} to {high}, not {word!r}")
    return int(word)


def _result(test: Test, rates: list[float]) -> dict[str, Any]:
    """In the names of llama-bench's JSON; rates are tokens a second."""
    import statistics  # fractions, decimals and random numbers, which no other verb needs

    return {
        "test": test.name,
        "n_prompt": test.prompt,
        "n_gen": test.generated,
        "n_depth": test.depth,
        "avg_ts": statistics.mean(rates),
        "stddev_ts": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "samples_ts": rates,
    }
