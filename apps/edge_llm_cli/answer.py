"""What `run` and `chat` share: opening an engine by a model's name, and showing an answer while it comes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edge_llm.errors import ParameterError
from edge_llm.messages import Finished, FinishReason, ReasoningDelta, TextDelta
from edge_llm.sampling.params import SamplingParams
from edge_llm_cli import console
from edge_llm_cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from edge_llm.config import EngineConfig
    from edge_llm.engine.engine import Engine
    from edge_llm.engine.handle import Handle

engine_option = partial(typer.Option, rich_help_panel="Engine")
kept_option = partial(typer.Option, rich_help_panel="What is kept")
ContextOption = Annotated[int | None, engine_option(help="Tokens that the model sees, prompt and answer together.")]
PolicyOption = Annotated[
    str | None,
    engine_option(
        metavar="error|slide",
        help="Past the context: error (default), or slide to go on without the oldest tokens.",
    ),
]
ThreadsOption = Annotated[int | None, engine_option(help="Threads that compute; default: one a physical core.")]
ProviderOption = Annotated[
    str | None,
    engine_option(
        metavar="auto|cpu|openvino|qnn",
        help="What computes; the last two are plugins to be installed (default: auto, the CPU).",
    ),
]
KvOption = Annotated[str | None, engine_option(metavar="int8|f32", help="How keys and values are kept.")]
CacheOption = Annotated[
    str | None,
    kept_option(
        metavar="on|off",
        help="Keep on disk what the model has read, for the next time: on (default) or off.",
    ),
]
SeldomCacheOption = Annotated[
    str | None,
    kept_option(
        metavar="on|off",
        help="Keep on disk what the model has read, for the next time: off (default) or on.",
    ),
]
PrivateOption = Annotated[bool, kept_option("--private", help="Keep nothing of this conversation on disk.")]
BURST_S = 0.2
"""a key that is held, or somebody impatient"""
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the command line may set about an engine; None: not given. `usual_...` are the program's own defaults.

    Raises `ParameterError` for a `cache` that is neither on nor off, or that does not agree with `private`.
    """

    context: int | None = None
    threads: int | None = None
    kv_type: str | None = None
    context_policy: str | None = None
    cache: str | None = None
    private: bool = False
    usual_policy: str = "error"
    speculation: str | None = None
    slots: int | None = None
    usual_cache: str = "disk"
    provider: str | None = None

    def __post_init__(self) -> None:
        if self.cache not in (None, "on", "off"):
            raise ParameterError(f"--cache must be on or off, not {self.cache!r}")
        if self.cache == "on" and self.private:
            raise ParameterError("--cache on keeps something on disk, --private does not", hint="leave one of them out")

    @property
    def prefix_cache(self) -> str | None:
        """What the config calls it."""
        return None if self.cache is None else {"on": "disk", "off": "memory"}[self.cache]


def engine_config(options: EngineOptions) -> EngineConfig:
    """The config of an engine that one person uses. Raises `ParameterError`."""
    from edge_llm.config import load_config

    return load_config(
        defaults={"context_policy": options.usual_policy, "prefix_cache": options.usual_cache},
        slots=options.slots,
        context=options.context,
        threads=options.threads,
        kv_type=options.kv_type,
        context_policy=options.context_policy,
        speculation=options.speculation,
        prefix_cache=options.prefix_cache,
        private=options.private or None,
        provider=options.provider,
    )


@contextlib.contextmanager
def opened(model: str, options: EngineOptions) -> Iterator[tuple[Engine, float]]:
    """The engine of `model` and the seconds its loading took. The first use fetches, imports and compiles, visibly."""
    from edge_llm.cache.block_folder import prefix_folder
    from edge_llm.engine.engine import Engine
    from edge_llm.install.importer import resolve

    config = engine_config(options)
    untold = config.stores_prefixes and not prefix_folder().exists()
    with ProgressDisplay() as progress:
        folder = resolve(model, progress)
        started = time.perf_counter()
        engine = Engine.open(folder, config, progress=progress)
    if untold and prefix_folder().exists():
        console.note(f"what the model reads is kept in {prefix_folder()}; --cache off or --private keeps nothing")
    if engine.info.notice:
        console.note(engine.info.notice)
    with engine:
        yield engine, time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said, how it ended, and whether the user stopped it."""

    text: str
    finished: Finished
    interrupted: bool
    reasoning: str = ""
    """what the model thought before"""


def show(handle: Handle) -> Answer:
    """Reads an answer to its end and writes it to stdout while it comes."""
    writer = console.AnswerWriter()
    try:
        return read(handle, writer.write)
    finally:
        writer.finish()


def read(handle: Handle, take: Callable[[str], None] | None = None) -> Answer:
    """Reads an answer to its end, giving each piece to `take`. Ctrl-C ends it within a step and keeps what was said.

    A second Ctrl-C leaves at once; several within `BURST_S` are one.
    """
    pieces, thoughts = [], []
    with _cancelled_by_ctrl_c(handle) as presses, contextlib.closing(handle):
        for event in handle:
            if isinstance(event, TextDelta):
                pieces.append(event.text)
                if take is not None:
                    take(event.text)
            elif isinstance(event, ReasoningDelta):
                thoughts.append(event.text)
    assert handle.finished is not None
    return Answer("".join(pieces), handle.finished, bool(presses), "".join(thoughts))


@contextlib.contextmanager
def _cancelled_by_ctrl_c(handle: Handle) -> Iterator[list[float]]:
    """Gives the times at which Ctrl-C was pressed. KeyboardInterrupt would lose text: it is raised anywhere.

    A press may come while another is being handled, on the same thread: nothing here takes a lock.
    """
    presses: list[float] = []

    def press(_number: int, _frame: object) -> None:
        first = not presses
        presses.append(time.monotonic())
        if first:
            handle.cancel()
        elif presses[-1] - presses[0] > BURST_S:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield presses
    finally:
        if not presses:  # else the rest of a burst must not disturb what comes now
            signal.signal(signal.SIGINT, previous)


def note_if_cut(result: Answer, params: SamplingParams) -> None:
    """One line on stderr about an answer that reached a limit, naming it."""
    if result.finished.reason is FinishReason.LENGTH:
        limit = f"--max-tokens {params.max_tokens}"
        reached = result.finished.usage.completion_tokens == params.max_tokens
        console.note(f"the answer was cut: it reached {limit if reached else 'the end of the context'}")


def argument_text(text: str) -> str:
    """A command line's text: bytes that were not UTF-8 arrive as surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
