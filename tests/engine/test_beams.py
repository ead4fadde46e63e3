"""Beam search through the whole engine: what is found, what it copies, and that every slot comes back."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_llm.cache.tiled_rows import TiledRows
from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.beams import Beams, Branch
from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import Request
from edge_llm.engine.sequence import Phase
from edge_llm.errors import GenerationError, ParameterError, SessionError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished, FinishReason, Message, Tool
from edge_llm.model.step import Segment, Step
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import END, VOCAB, byte_ids, hashed_logits, make_core, text_of
from tests.engine.test_core import Asked, answer, ask, run
from tests.reference.beams import Found, beam_search


def prompt_of(length: int) -> list[int]:
    return [3 + (7 * length + i * i) % (VOCAB - 3) for i in range(length)]


def search(core: EngineCore, prompt: int | list[int], beams: int = 3, *, params: Any = None, **options: Any) -> Asked:
    """Enqueue a search, all of whose beams are results."""
    ids = prompt_of(prompt) if isinstance(prompt, int) else prompt
    events: list[object] = []
    request = Request(
        token_ids=tuple(ids),
        params=SamplingParams(**{"max_tokens": 6, **(params or {})}),
        **{"beams": beams, "n_best": beams, **options},
    )
    asked = Asked(core.prepare(request, events.append), events)
    core.enqueue(asked.sequence)
    return asked


def told(asked: Asked) -> Found:
    return [(list(beam.token_ids), beam.logprob, beam.score) for beam in asked.finished.beams]


def same(one: Found, other: Found, ends: tuple[int, ...] = ()) -> bool:
    """Whether both hold the same beams; what the engine tells leaves the end out."""
    other = [(ids[:-1] if ids[-1] in ends else ids, *numbers) for ids, *numbers in other]
    return [ids for ids, *_ in one] == [ids for ids, *_ in other] and bool(
        np.allclose([numbers for _, *numbers in one], [numbers for _, *numbers in other], rtol=1e-6)
    )


def often_ends(ids: list[int]) -> np.ndarray:
    """As the fake model, but each answer may end soon."""
    row = hashed_logits(ids)
    row[END] = row[20:].max() - 0.5 - (ids[-1] % 4)
    return row


@pytest.mark.parametrize("beams", [2, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"length_penalty": 0.0},
        {"length_penalty": 2.0},
        {"length_penalty": -1.0, "early_stopping": True},
        {"early_stopping": True},
    ],
    ids=str,
)
def test_what_is_found_is_what_the_rules_say(beams: int, options: dict[str, Any]) -> None:
    for prompt in (1, 30, 70):
        core = make_core(often_ends, slots=beams, max_rows=32)
        asked = search(core, prompt, beams, params={"max_tokens": 9}, **options)
        run(core)
        expected = beam_search(often_ends, prompt_of(prompt), beams=beams, max_tokens=9, ends=(END, 0), **options)
        assert same(told(asked), expected, (END, 0))
        assert core.free_slots == beams
        best = asked.finished.beams[0]
        assert (asked.finished.token_ids, text_of(asked.events)) == (best.token_ids, best.text)
        assert sum(not isinstance(event, Finished) for event in asked.events) >= 1


def test_two_searches_and_others_run_side_by_side() -> None:
    """B15: each finds what it finds alone."""
    core = make_core(slots=9, spare=2, mixed_chunk=5, max_rows=32)
    searches = [(40, search(core, 40, 3)), (75, search(core, 75, 4))]
    singles = [(n, ask(core, n, max_tokens=12)) for n in (3, 66, 9)]
    searches.append((12, search(core, 12, 2, params={"max_tokens": 20})))
    run(core)
    for prompt, asked in searches:
        params = {"beams": asked.sequence.width, "max_tokens": asked.sequence.max_tokens}
        assert same(told(asked), beam_search(hashed_logits, prompt_of(prompt), **params))
    for prompt, asked in singles:
        assert list(asked.finished.token_ids) == answer(prompt, max_tokens=12)


def test_rows_that_others_have_are_not_computed_and_those_of_beams_are_left() -> None:
    core = make_core(slots=3, spare=2)
    first = search(core, 50)
    run(core)
    rows = sum(step.rows for step in core.session.steps)
    assert rows == 50 + 3 * 5
    again = search(core, 50)
    run(core)
    assert again.finished.usage.cached_tokens == 49
    assert told(again) == told(first)
    core.session.steps.clear()
    kept = first.sequence.ids  # of the beam that lay in the first slot
    after = ask(core, [*kept, 7], max_tokens=2)
    run(core)
    assert after.finished.usage.cached_tokens == len(kept) - (len(kept) == 50 + 6)
    assert list(after.finished.token_ids) == _greedy([*kept, 7], 2)


def _greedy(ids: list[int], tokens: int) -> list[int]:
    said: list[int] = []
    for _ in range(tokens):
        said.append(int(hashed_logits([*ids, *said]).argmax()))
    return said


def test_only_tiles_after_the_fork_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = TiledRows.copy

    def counted(self: TiledRows, source: int, target: int, tiles: np.ndarray) -> None:
        copied.append(int(tiles.sum()))
        copy(self, source, target, tiles)

    monkeypatch.setattr(TiledRows, "copy", counted)
    core = make_core(slots=4, context=512)
    asked = search(core, 320, 4, params={"max_tokens": 40})
    run(core)
    assert copied[:3] == [5, 5, 5]  # the whole prompt, once for each further beam
    assert len(copied) > 3
    assert set(copied[3:]) == {1}
    assert same(told(asked), beam_search(hashed_logits, prompt_of(320), beams=4, max_tokens=40))


def test_blocks_that_a_search_leaves_on_disk_are_those_of_one_beam(tmp_path: Path) -> None:
    """The beam in the slot that stores them changes at the ends of blocks too."""
    for prompt in (62, 120, 127):
        core = make_core(slots=3, context=512, folder=tmp_path)
        asked = search(core, prompt, params={"max_tokens": 80})
        run(core)
        assert same(told(asked), beam_search(hashed_logits, prompt_of(prompt), beams=3, max_tokens=80))
        core.close()
        core = make_core(slots=3, context=512, folder=tmp_path)
        ids = [*asked.sequence.ids, 9]
        after = ask(core, ids, max_tokens=3)
        run(core)
        assert after.finished.usage.cached_tokens > prompt
        assert list(after.finished.token_ids) == _greedy(ids, 3)
        core.close()


@pytest.mark.parametrize("layout", ["ring", "static"])
def test_real_beams_score_what_a_recomputation_gives(tiny_folder: Path, kernels: KernelLibrary, layout: str) -> None:
    """Rows that were copied from slot to slot, across tiles, are those that a fresh prompt computes, bit for bit."""
    config = EngineConfig(context=256, slots=4, max_chunk=32, layout=layout)
    core = open_engine(tiny_folder, config)
    asked = search(core, 120, 4, params={"max_tokens": 20, "ignore_eos": True})
    run(core)

    def fresh(ids: list[int]) -> np.ndarray:
        slot = core.cache.acquire()
        assert slot is not None
        for start in range(0, len(ids), 32):
            part = ids[start : start + 32]
            logits = core.session.forward(Step((Segment(slot, start, part, 1),)))
            core.cache.commit(slot, len(part))
        core.cache.release(slot)
        return logits[-1].copy()

    expected = beam_search(fresh, prompt_of(120), beams=4, max_tokens=20)
    assert same(told(asked), expected)
    core.close()


def test_a_beam_goes_where_most_of_it_is_already() -> None:
    asked: list[tuple[str, int, int, int]] = []
    prefixes = SimpleNamespace(
        branch=lambda slot, ids: asked.append(("branch", slot, -1, len(ids))) or 10 + len(asked),
        replace=lambda slot, source, same: asked.append(("replace", slot, source, same)),
    )
    beams = Beams(SimpleNamespace(width=4), lambda: None, 1)
    root = Branch(5, [1, 2])
    for picks in (
        [(0, 3), (0, 4), (0, 5), (0, 6)],
        [(0, 7), (0, 8), (1, 7), (1, 8)],
        [(2, 9), (2, 8), (0, 9), (0, 8)],
    ):
        beams.follow(picks, root, prefixes)
    assert [branch.ids for branch in beams.branches] == [
        [1, 2, *end] for end in ([4, 7, 9], [4, 7, 8], [3, 7, 9], [3, 7, 8])
    ]
    assert [branch.slot for branch in beams.branches] == [11, 13, 5, 12]
    assert beams.branches[2].ids is root.ids
    assert asked == [
        *[("branch", 5, -1, 2)] * 3,
        ("replace", 12, 5, 2),
        ("replace", 13, 11, 2),
        ("replace", 13, 11, 3),
        ("replace", 12, 5, 3),
    ]


# --- how it ends -----------------------------------------------------------------------------------------------------


def spells(text: str | list[int], other: str | list[int]) -> Any:
    """A model of which one answer is likely, and another one a little less."""
    one, two = (byte_ids(said) if isinstance(said, str) else said for said in (text, other))

    def row(ids: list[int]) -> np.ndarray:
        said = ids[1:]
        logits = np.zeros(VOCAB, np.float32)
        logits[[60, 61, 62, 63]] = 1.0
        for tokens, weight in ((one, 12.0), (two, 11.5)):
            if said == tokens[: len(said)]:
                logits[tokens[len(said)] if len(said) < len(tokens) else END] = weight
        return logits

    return row


def test_beams_end_at_stops_and_end_tokens() -> None:
    core = make_core(spells("one two", "once more"), slots=2)
    asked = search(core, [5], 2, params={"max_tokens": 30})
    run(core)
    assert [beam.text for beam in asked.finished.beams] == ["one two", "once more"]
    assert asked.finished.reason is FinishReason.STOP
    assert asked.finished.usage.completion_tokens == len("one two") + 1
    stopped = search(core, [5], 2, params={"max_tokens": 30, "stop": ("two", "mor")})
    run(core)
    assert [beam.text for beam in stopped.finished.beams] == ["one ", "once "]
    assert (stopped.finished.reason, stopped.finished.matched_stop) == (FinishReason.STOP, "two")
    assert text_of(stopped.events) == "one "
    assert core.free_slots == 2


def test_a_stop_of_many_bytes_is_found_across_tokens_and_reorders() -> None:
    core = make_core(spells("ab déjà vu", "ab déjeuner"), slots=2)
    asked = search(core, [5], 2, params={"max_tokens": 30, "stop": ("éjà", "<|im_end|>")})
    run(core)
    beams = asked.finished.beams
    assert [beam.text for beam in beams] == ["ab d", "ab déjeuner"]
    assert [beam.logprob / beam.score for beam in beams] == pytest.approx(
        [len("ab déjà".encode()), len(b"ab d__jeuner") + 1]
    )


def test_a_stop_is_found_around_a_token_that_is_not_shown() -> None:
    texts = [[*byte_ids("ab"), 0, *byte_ids("cd")], byte_ids("xyz!")]
    core = make_core(spells(*texts), slots=2, eos=(END,))
    asked = search(core, [5], 2, params={"max_tokens": 30, "stop": ("bc",)})
    run(core)
    assert [beam.text for beam in asked.finished.beams] == ["a", "xyz!"]
    assert asked.finished.beams[0].logprob / asked.finished.beams[0].score == pytest.approx(4)


def test_an_answer_as_long_as_it_may_be_is_cut() -> None:
    core = make_core(slots=2, context=80)
    asked = search(core, 70, 2, params={"max_tokens": 1000})
    run(core)
    assert asked.finished.reason is FinishReason.LENGTH
    assert [len(beam.token_ids) for beam in asked.finished.beams] == [10, 10]


def test_end_tokens_may_be_ignored() -> None:
    core = make_core(often_ends, slots=2)
    asked = search(core, 30, 2, params={"max_tokens": 9, "ignore_eos": True})
    run(core)
    assert same(told(asked), beam_search(often_ends, prompt_of(30), beams=2, max_tokens=9))


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREFILL, Phase.DECODE])
@pytest.mark.parametrize("how", ["cancel", "timeout", "close"])
def test_what_is_cut_gives_the_best_so_far(phase: Phase, how: str) -> None:
    now = 0.0
    core = make_core(slots=3, max_rows=16, clock=lambda: now)
    if phase is Phase.QUEUED:
        ask(core, 5, max_tokens=30)
    asked = search(core, 40, params={"max_tokens": 50}, timeout_s=9.0 if how == "timeout" else None)
    for _ in range({Phase.QUEUED: 2, Phase.PREFILL: 2, Phase.DECODE: 6}[phase]):
        core.step()
    assert asked.sequence.phase is phase
    if how == "cancel":
        asked.sequence.cancel()
    now = 10.0
    core.close() if how == "close" else core.step()
    last = asked.finished
    assert last.reason is (FinishReason.TIMEOUT if how == "timeout" else FinishReason.CANCELLED)
    if phase is Phase.DECODE:
        best = beam_search(hashed_logits, prompt_of(40), beams=3, max_tokens=4)[0][0]
        assert (list(last.token_ids), last.beams[0].text) == (best, text_of(asked.events))
    else:
        assert (last.token_ids, last.beams) == ((), ())
    if how != "close":
        core.check_integrity()
        assert core.free_slots == (2 if phase is Phase.QUEUED else 3)


def test_failures_free_all_slots() -> None:
    def poisoned(ids: list[int]) -> np.ndarray:
        row = hashed_logits(ids)
        if ids[0] == 7 and len(ids) == 14:
            row[:] = (np.nan, np.inf)[ids[1] == 8]
        return row

    core = make_core(poisoned, slots=4)
    for second in (8, 9):
        bad, good = search(core, [7, second, *range(30, 40)]), ask(core, 4, max_tokens=9)
        run(core)
        assert isinstance(bad.last, GenerationError)
        assert list(good.finished.token_ids) == answer(4, max_tokens=9)
        assert core.free_slots == 4
    asked = search(core, 5)
    core.step()
    core.step()

    def fail(step: object) -> None:
        raise SessionError("the step failed")

    core.session.before_step = fail
    core.step()
    assert isinstance(asked.last, SessionError)
    core.check_integrity()
    assert core.free_slots == 4


# --- company ---------------------------------------------------------------------------------------------------------


def test_a_search_waits_for_all_its_slots_and_is_not_parked() -> None:
    core = make_core(slots=3)
    short, asked = ask(core, 4, max_tokens=5), search(core, 9, priority="batch")
    core.step()
    assert asked.sequence.phase is Phase.QUEUED
    while not short.ended:
        core.step()
    core.step()
    core.step()
    assert (asked.sequence.phase, core.free_slots) == (Phase.DECODE, 0)
    urgent = ask(core, 5, max_tokens=2, priority="interactive")
    while not asked.ended:
        assert urgent.sequence.phase is Phase.QUEUED
        core.step()
        core.check_integrity()
    run(core)
    assert list(urgent.finished.token_ids) == answer(5, max_tokens=2)
    assert same(told(asked), beam_search(hashed_logits, prompt_of(9), beams=3, max_tokens=6))


def test_each_beam_counts_in_the_budget_of_memory() -> None:
    tile = make_core(context=512).cache.bytes_of(1)
    core = make_core(slots=6, spare=2, context=512, kv_budget=9 * tile)
    asked = [search(core, 70, 3), search(core, 60, 3), search(core, 9, 2), search(core, 100, 2)]
    most = 0
    while core.has_work:
        core.step()
        core.check_integrity()
        most = max(most, core.cache.used_bytes)
    assert 6 * tile <= most <= 9 * tile
    for one, prompt in zip(asked, (70, 60, 9, 100), strict=True):
        width = one.sequence.width
        assert same(told(one), beam_search(hashed_logits, prompt_of(prompt), beams=width, max_tokens=6))
    with pytest.raises(ParameterError, match="3 beams may take"):
        search(core, 70, 3, params={"max_tokens": 300})


def test_beams_beyond_the_slots_are_refused() -> None:
    core = make_core(slots=3)
    with pytest.raises(ParameterError, match="4 beams need as many slots, this engine has 3"):
        search(core, 5, 4)
    assert not core.has_work


TOOL = Tool("f", "", "{}")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"response_format": Grammar.regex("a")}, "regex"),
        ({"choices": ("a", "b")}, "choices"),
        ({"embedding": "mean"}, "embedding"),
        ({"context_policy": "slide"}, "slide"),
        ({"params": {"temperature": 0.5}}, "temperature"),
        ({"params": {"top_k": 5, "logprobs": True}}, "top_k, logprobs"),
        ({"params": {"logit_bias": {5: 1.0}}}, "logit_bias"),
        ({"params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"params": {"mirostat_tau": 2.0}}, "mirostat_tau"),
        ({"beams": 0}, "beams"),
        ({"beams": 65}, "beams"),
        ({"beams": 2.0}, "beams"),
        ({"beams": True}, "beams"),
        ({"n_best": 4}, "n_best"),
        ({"n_best": 0}, "n_best"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"beams": 1, "n_best": 1, "length_penalty": 2.0}, "length_penalty needs beams"),
        ({"beams": 1, "n_best": 1, "early_stopping": True}, "early_stopping needs beams"),
        ({"beams": 1, "n_best": 2}, "n_best needs beams"),
    ],
)
def test_what_does_not_combine_is_named(options: dict[str, Any], named: str) -> None:
    core = make_core(slots=3)
    with pytest.raises(ParameterError, match=named):
        search(core, 5, **options)
    assert not core.has_work


def test_tools_and_an_engine_that_slides_are_refused_too() -> None:
    with pytest.raises(ParameterError, match="tools"):
        Request.chat([Message.user("Hi")], tools=(TOOL,), beams=2)
    core = make_core(slots=3, context_policy="slide")
    with pytest.raises(ParameterError, match="slide"):
        search(core, 5)
    asked = search(core, 5, context_policy="error")
    run(core)
    assert same(told(asked), beam_search(hashed_logits, prompt_of(5), beams=3, max_tokens=6))


def test_greedy_settings_are_no_contradiction() -> None:
    core = make_core(slots=3)
    params = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 5}
    asked = search(core, 5, params=params)
    run(core)
    assert same(told(asked), beam_search(hashed_logits, prompt_of(5), beams=3, max_tokens=6))


def test_any_order_of_searches_and_ends_leaves_nothing_behind() -> None:
    """Random lives, each checked at every step."""
    generator = random.Random(4)
    for life in range(12):
        slots = generator.randint(2, 5)
        core = make_core(slots=slots, spare=generator.randint(0, 2), max_rows=16, mixed_chunk=5, max_queued_requests=50)
        asked = []
        for _ in range(12):
            prompt = generator.choice([1, 20, 20, 63, 64, 65])
            if generator.random() < 0.6:
                asked.append((prompt, search(core, prompt, generator.randint(2, slots))))
            else:
                asked.append((prompt, ask(core, prompt, max_tokens=5, priority="batch")))
            for _ in range(generator.randint(0, 5)):
                core.step()
                core.check_integrity()
            if generator.random() < 0.3:
                generator.choice(asked)[1].sequence.cancel()
        run(core)
        assert core.free_slots == slots
        for prompt, one in asked:
            if one.finished.reason is FinishReason.CANCELLED:
                continue
            width = one.sequence.width
            expected = beam_search(hashed_logits, prompt_of(prompt), beams=width, max_tokens=6 if width > 1 else 5)
            assert list(one.finished.token_ids) == expected[0][0], life
