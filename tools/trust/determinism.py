"""F20: the same request in other circumstances. A trial is a pair: its answer alone, and its answer in one of them.

    python -m tools.trust.determinism [--size commit|nightly] [--seed N]

Requests of all kinds to a tiny model: every stage of the sampler, grammars, beams, conversations past their context, prompts
that begin alike. Equal are the tokens, the text, how it ended, and the log-probabilities of each token and of the best beside
it, which are only equal if the logits are.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edge_llm.config import EngineConfig
from edge_llm.engine import assembly
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.client import ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.engine.handle import Handle
from edge_llm.engine.process_client import ProcessClient
from edge_llm.engine.request import Request
from edge_llm.messages import Finished, TextDelta
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from tools.trust.deaths import _model
from tools.trust.figure import Figure

CONTEXT, TOGETHER = 128, 8
_ALONE = EngineConfig(context=CONTEXT, slots=3, max_chunk=64, prefix_cache="off", speculation="off", threads=2)
_OTHERS = _ALONE.with_options(slots=TOGETHER)
_SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.2, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"temperature": 1.0, "mirostat_tau": 4.0},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "typical_p": 0.9},
)

Told = tuple[Any, ...]


def told(events: Sequence[object]) -> Told:
    """What must be the same of an answer."""
    last = events[-1]
    assert isinstance(last, Finished), last
    deltas = [event for event in events if isinstance(event, TextDelta)]
    text, tokens = "".join(delta.text for delta in deltas), tuple(token for delta in deltas for token in delta.tokens)
    return text, last.token_ids, last.reason, last.matched_stop, tokens, last.beams


# --- requests ----------------------------------------------------------------------------------------------------------


def requests(generator: random.Random, number: int) -> list[Request]:
    """Those of a round: no other one has prompts like them. A grammar is in one of them now and then: to compile it, each
    engine starts a process."""
    beginning = [generator.randrange(3, 300) for _ in range(70)]
    kinds = [_structured if number % 10 == 0 else _sampled, *[_sampled] * 4, _repeating, _sliding, _beams]
    return [kind(generator, _ids(generator, beginning)) for kind in kinds]


def _ids(generator: random.Random, beginning: list[int]) -> tuple[int, ...]:
    """Some begin alike, some repeat themselves, so that drafts are right now and then."""
    words = [generator.randrange(3, 300) for _ in range(generator.randint(1, 12))]
    shared = beginning if generator.random() < 0.5 else beginning[: generator.randrange(1, 20)]
    return (*shared, *words * generator.randint(1, 2))


def _sampled(generator: random.Random, ids: tuple[int, ...]) -> Request:
    stop = ("e", "qu") if generator.random() < 0.3 else ()
    params = {**generator.choice(_SAMPLERS), "stop": stop, "ignore_eos": generator.random() < 0.7}
    return Request(token_ids=ids, params=_params(generator, **params))


def _repeating(generator: random.Random, ids: tuple[int, ...]) -> Request:
    """Of two tokens, so that many drafts are right and many are wrong."""
    bias = dict.fromkeys(generator.sample(range(3, 300), 2), 30.0)
    return Request(token_ids=ids, params=_params(generator, logit_bias=bias).with_options(max_tokens=48))


def _sliding(generator: random.Random, ids: tuple[int, ...]) -> Request:
    return Request(token_ids=ids * 3, params=_params(generator, ignore_eos=True), context_policy="slide")


def _structured(generator: random.Random, ids: tuple[int, ...]) -> Request:
    return Request(
        token_ids=ids, params=_params(generator), response_format=Grammar.regex("(yes|no|perhaps) [a-z]{1,9}")
    )


def _beams(generator: random.Random, ids: tuple[int, ...]) -> Request:
    params = SamplingParams(max_tokens=generator.randint(4, 20), ignore_eos=True)
    return Request(token_ids=ids, params=params, beams=3, n_best=2)


def _params(generator: random.Random, **options: Any) -> SamplingParams:
    chosen = {"temperature": 0.9, **options, "max_tokens": generator.randint(4, 28), "seed": generator.randrange(2**64)}
    return SamplingParams(**chosen, logprobs=True, top_logprobs=2)


# --- circumstances -----------------------------------------------------------------------------------------------------


@dataclass
class Rig:
    """A model, and what the circumstances of one round draw their accidents from."""

    model: Path
    smaller: Path
    generator: random.Random
    child: ProcessClient

    @contextmanager
    def core(self, config: EngineConfig) -> Iterator[EngineCore]:
        with closing(open_engine(self.model, config)) as core:
            yield core


def _together(core: EngineCore, asked: Sequence[Request], between: Callable[[], int] = lambda: 0) -> list[Told]:
    """Ask all, with so many steps after each, and run to the end."""
    events: list[list[object]] = []
    for request in asked:
        events.append([])
        core.enqueue(core.prepare(request, events[-1].append))
        for _ in range(between()):
            core.step()
    while core.has_work:
        core.step()
    return [told(one) for one in events]


def _one_by_one(core: EngineCore, asked: Sequence[Request]) -> list[Told]:
    return [_together(core, [request])[0] for request in asked]


def alone(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    with rig.core(_ALONE) as core:
        return _one_by_one(core, asked)


def restarted(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    """Another engine, with one thread and other chunks."""
    chunk = rig.generator.choice([3, 16, 31])
    with rig.core(_ALONE.with_options(threads=1, max_chunk=chunk)) as core:
        return _one_by_one(core, asked)


def found_in_memory(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    with rig.core(_ALONE.with_options(prefix_cache="memory")) as core:
        answers = []
        for request in asked:
            _together(core, [request])
            answers += _together(core, [request])
        assert core.statistics().prefix_cache_hits["memory"] > 0
        return answers


def found_on_disk(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    with rig.core(_ALONE.with_options(prefix_cache="disk")) as core:
        _one_by_one(core, asked)
    with rig.core(_ALONE.with_options(prefix_cache="disk")) as core:
        answers = _one_by_one(core, asked)
        assert core.statistics().prefix_cache_hits["disk"] > 0
        return answers


def among_seven(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    """All at once; prompts that begin alike are read once. (A search takes three slots, so not all run at a time.)"""
    with rig.core(_OTHERS.with_options(prefix_cache="memory")) as core:
        return _together(core, asked)


def in_another_order(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    """They join one after the other, at other places of each other's answers."""
    order = rig.generator.sample(range(len(asked)), len(asked))
    with rig.core(_OTHERS.with_options(mixed_chunk=rig.generator.choice([1, 5, 64]))) as core:
        answers = _together(core, [asked[i] for i in order], lambda: rig.generator.randrange(6))
    return [answers[order.index(i)] for i in range(len(asked))]


def speculated(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    with rig.core(_OTHERS.with_options(speculation="lookup")) as core:
        answers = _together(core, asked)
        statistics = core.statistics()
        assert 0 < statistics.spec_decode_num_accepted_tokens < statistics.spec_decode_num_draft_tokens
        return answers


def drafted(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    """By the model itself, which is always right, or by another one. Some are asked while others run."""
    draft = rig.generator.choice((rig.model, rig.smaller))
    with rig.core(_OTHERS.with_options(speculation=f"draft:{draft}", prefix_cache="memory")) as core:
        assert core.intake.draft_model is not None
        core.intake.draft_model.cost = 0.0  # tried wherever it can be
        answers = _together(core, asked, lambda: rig.generator.choice((0, 5, 30)))
        assert core.statistics().spec_decode_num_draft_tokens > 0
        return answers


def parked(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    """More urgent ones take their slots, again and again."""
    with rig.core(_ALONE) as core:
        events: list[list[object]] = [[] for _ in asked]
        for request, own in zip(asked, events, strict=True):
            core.enqueue(core.prepare(replace(request, priority="batch"), own.append))
        step = 0
        while core.has_work:
            core.step()
            step += 1
            if step % 7 == 0 and step < 300 and core.free_slots == 0:
                ids = tuple(rig.generator.randrange(3, 300) for _ in range(5))
                urgent = Request(token_ids=ids, params=SamplingParams(max_tokens=2), priority="interactive")
                core.enqueue(core.prepare(urgent, lambda event: None))
        assert core.statistics().num_preemptions > 0
        return [told(one) for one in events]


def streamed(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    """Event by event, by tasks of an event loop while the engine's thread runs."""

    async def read(handle: Handle) -> list[object]:
        return [event async for event in handle]

    async def read_all(client: ThreadClient) -> list[list[object]]:
        return await asyncio.gather(*(read(client.submit(request)) for request in asked))

    with closing(ThreadClient(open_engine(rig.model, _OTHERS))) as client:
        return [told(events) for events in asyncio.run(read_all(client))]


def in_a_child(rig: Rig, asked: Sequence[Request]) -> list[Told]:
    return [told(list(handle)) for handle in [rig.child.submit(request) for request in asked]]


CIRCUMSTANCES = (
    restarted,
    found_in_memory,
    found_on_disk,
    among_seven,
    in_another_order,
    speculated,
    drafted,
    parked,
    streamed,
    in_a_child,
)


def trials(count: int, seed: int) -> int:
    """Rounds of 8 requests in all circumstances, until there were `count` pairs; gives how many there were."""
    generator = random.Random(seed)
    done = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(patch.object(assembly, "prefix_folder", lambda: folder / "prefixes"))
        model, smaller = _model(folder), _model(folder, "smaller", seed=9, layers=1)
        child = stack.enter_context(closing(ProcessClient(model, _OTHERS)))
        while done < count:
            asked = requests(generator, done // (TOGETHER * len(CIRCUMSTANCES)))
            rig = Rig(model, smaller, generator, child)
            expected = alone(rig, asked)
            for circumstance in CIRCUMSTANCES:
                answers = circumstance(rig, asked)
                for i, (answer, right) in enumerate(zip(answers, expected, strict=True)):
                    assert answer == right, f"{circumstance.__name__}: request {i} of pairs {done} on: {asked[i]}"
                done += len(asked)
    return done


FIGURE = Figure(
    "F20",
    "answers alone and restarted, crowded, reordered, found in memory or on disk, speculated, parked, streamed, in a child",
    "python -m tools.trust.determinism",
    {"commit": 200, "nightly": 20_000},
    trials,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main(sys.argv[1:]))
