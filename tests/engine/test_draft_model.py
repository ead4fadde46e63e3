"""A draft model changes the steps and no text, reads what it must and no more, and keeps out of the way of others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.core import EngineCore
from edge_llm.engine.draft_model import CHUNK
from edge_llm.engine.host import usual_bytes
from edge_llm.engine.request import Request
from edge_llm.errors import ParameterError, SessionError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished, TextDelta, TokenInfo
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from tests.conftest import export
from tests.engine.fakes import VOCAB, FakeSession, hashed_logits, make_core
from tests.engine.test_core import answer, ask, mostly_right, run
from tools.tiny_model import write_tiny_gguf

CONFIG = EngineConfig(context=256, slots=2, max_chunk=32, speculation="off")


def drafting(core: EngineCore) -> FakeSession:
    """The draft model's session."""
    assert core.intake.draft_model is not None
    session = core.intake.draft_model._session
    assert isinstance(session, FakeSession)
    return session


def rows(session: FakeSession) -> int:
    """Rows computed since this was last asked."""
    computed = sum(step.rows for step in session.steps)
    session.steps.clear()
    return computed


# --- what it drafts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_expects_the_same_is_always_right(temperature: float) -> None:
    core = make_core(drafts=hashed_logits)
    asked = ask(core, 5, max_tokens=120, temperature=temperature, seed=3)
    run(core)
    assert list(asked.finished.token_ids) == answer(5, max_tokens=120, temperature=temperature, seed=3)
    usage = asked.finished.usage
    assert usage.accepted_draft_tokens == usage.draft_tokens > 100
    assert len(core.session.steps) < 20
    assert rows(drafting(core)) < 5 + 120  # a row for each token, but for the last drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_is_mostly_right_saves_steps_and_who_never_is_costs_few(temperature: float) -> None:
    right = answer(9, max_tokens=200, temperature=temperature, seed=1)
    for model, fewest, most in ((mostly_right, 50, 120), (lambda ids: 7, 190, 200)):
        core = make_core(drafts=model)
        asked = ask(core, 9, max_tokens=200, temperature=temperature, seed=1)
        run(core)
        assert list(asked.finished.token_ids) == right
        assert fewest <= len(core.session.steps) <= most
    usage = asked.finished.usage
    assert usage.draft_tokens - usage.accepted_draft_tokens < 40


def test_it_reads_a_long_prompt_in_chunks_and_only_for_a_long_answer() -> None:
    core = make_core(drafts=hashed_logits, draft_cost=0.3, max_rows=128)
    ask(core, 200, max_tokens=6)
    run(core)
    assert rows(drafting(core)) == 0  # 0.1 * 0.3 * 200: it would cost as much as six tokens
    asked = ask(core, 200, max_tokens=50)
    run(core)
    steps = [step.rows for step in drafting(core).steps]
    assert steps[:3] == [CHUNK, CHUNK, CHUNK]
    assert max(steps) == CHUNK
    assert asked.finished.usage.accepted_draft_tokens > 25


def test_the_next_turn_is_read_from_where_the_last_one_ended() -> None:
    core = make_core(drafts=hashed_logits)
    first = ask(core, 60, max_tokens=40)
    run(core)
    rows(drafting(core))
    ids = [*first.sequence.ids, 5, 6, 7]
    second = ask(core, ids, max_tokens=40)
    run(core)
    assert second.finished.usage.accepted_draft_tokens > 20
    assert rows(drafting(core)) < 3 + 40 + 12


def test_it_costs_little_where_it_is_wrong_and_is_tried_again() -> None:
    """Eight steps of the larger model and a twentieth of its answers, whatever is asked; then it is right, and pays."""
    cost, wrong = 0.3, True
    core = make_core(drafts=lambda ids: 7 if wrong else hashed_logits(ids), draft_cost=cost)
    tokens = 0
    for prompt in range(100, 160):
        tokens += ask(core, prompt, max_tokens=30).sequence.max_tokens
        run(core)
        spent = sum(cost * (0.1 * step.rows + 0.9 * step.logit_rows) for step in drafting(core).steps)
        assert spent <= 8 + 0.05 * tokens + 1e-9
    assert spent > 8
    wrong = False
    drafting(core).steps.clear()
    usages = []
    for prompt in range(160, 190):
        usages.append(ask(core, prompt, max_tokens=60).sequence)
        run(core)
    assert sum(sequence.accepted_drafts for sequence in usages[-5:]) > 200


def test_in_company_it_does_nothing() -> None:
    """A step of several conversations shares each load of the weights without it."""
    core = make_core(drafts=hashed_logits)
    long, short = ask(core, 5, max_tokens=90), ask(core, 6, max_tokens=30)
    while not short.ended:
        assert rows(drafting(core)) == 0
        core.step()
    run(core)
    assert long.finished.usage.accepted_draft_tokens > 40
    assert short.finished.usage.draft_tokens == 0
    assert list(long.finished.token_ids) == answer(5, max_tokens=90)
    assert list(short.finished.token_ids) == answer(6, max_tokens=30)


# --- what may go wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [1, 2, 5, 9])
def test_a_draft_model_that_fails_is_left_alone(fails_at: int) -> None:
    core = make_core(drafts=mostly_right)
    session = drafting(core)

    def fail(_step: object) -> None:
        if len(session.steps) >= fails_at:
            raise SessionError("no memory")

    session.before_step = fail
    asked = ask(core, 20, max_tokens=60)
    run(core)
    assert list(asked.finished.token_ids) == answer(20, max_tokens=60)
    assert len(session.steps) == fails_at
    session.before_step = lambda step: None
    again = ask(core, [*asked.sequence.ids, 4], max_tokens=20)
    run(core)
    fresh = make_core()
    expected = ask(fresh, [*asked.sequence.ids, 4], max_tokens=20)
    run(fresh)
    assert again.finished.token_ids == expected.finished.token_ids


def test_rows_that_are_no_numbers_draft_nothing() -> None:
    core = make_core(drafts=lambda ids: np.full(VOCAB, np.nan, np.float32))
    asked = ask(core, 20, max_tokens=30)
    run(core)
    assert list(asked.finished.token_ids) == answer(20, max_tokens=30)
    assert asked.finished.usage.draft_tokens == 0


def test_tokens_that_only_the_larger_model_has_are_never_given_to_the_other() -> None:
    core = make_core(drafts=hashed_logits)
    model = core.intake.draft_model
    assert model is not None
    model._vocab = VOCAB - 40
    seen: list[int] = []
    drafting(core).before_step = lambda step: seen.extend(i for s in step.segments for i in s.token_ids)
    asked = ask(core, 20, max_tokens=200)
    run(core)
    assert max(asked.sequence.ids) >= VOCAB - 40
    assert list(asked.finished.token_ids) == answer(20, max_tokens=200)
    assert all(token_id < VOCAB - 40 for token_id in seen)


def test_a_conversation_of_nobody_elses_leaves_no_rows() -> None:
    core = make_core(drafts=hashed_logits)
    events: list[object] = []
    params = SamplingParams(temperature=0, max_tokens=20)
    core.enqueue(core.prepare(Request(token_ids=tuple(range(3, 33)), params=params, cache=False), events.append))
    run(core)
    assert rows(drafting(core)) > 30
    ask(core, 4, max_tokens=1)
    run(core)
    assert core.intake.draft_model is not None
    assert core.intake.draft_model.used_bytes == 0


# --- over real kernels ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer, and a shorter context."""
    folder = tmp_path_factory.mktemp("smaller")
    return export(
        write_tiny_gguf(folder / "tiny.gguf", seed=8, layers=1, hidden=32, heads=2, kv_heads=1, context=100),
        folder / "exported",
    )


def requests() -> Iterator[Request]:
    """Every stage of the sampler that remembers, a grammar, and a conversation past its context, and the draft model's."""
    text = "one two three four five one two " * 4
    options: dict[str, object] = {"max_tokens": 60, "ignore_eos": True, "top_logprobs": 2}
    for changes in (
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 1, "repetition_penalty": 1.2},
        {"temperature": 1.2, "seed": 2, "dry_multiplier": 0.8, "dry_allowed_length": 1},
        {"temperature": 1.0, "seed": 3, "mirostat_tau": 3.0},
        {"temperature": 0.7, "seed": 4, "xtc_probability": 0.5, "presence_penalty": 0.5, "logit_bias": {330: 2.0}},
    ):
        yield Request.completion(text, SamplingParams(**{**options, **changes}))  # type: ignore[arg-type]
    yield Request.completion(text, SamplingParams(max_tokens=40, seed=5), response_format=Grammar.regex("[a-z ]{9,30}"))
    ids = tuple(3 + i * i % 300 for i in range(150))
    yield Request(token_ids=ids, params=SamplingParams(**options, seed=6), context_policy="slide")  # type: ignore[arg-type]


def told(core: EngineCore, *, disturb: bool) -> list[tuple[object, ...]]:
    """What is answered to each, one after the other; disturbed by others that are cancelled, or take its place."""
    answers: list[tuple[object, ...]] = []
    for number, request in enumerate(requests()):
        events: list[object] = []
        sequence = core.prepare(request, events.append)
        core.enqueue(sequence)
        for step in range(500):
            if disturb and step in (4 + number, 20, 33):
                ids = tuple(3 + (number + step * i) % 300 for i in range(70))
                other = Request(token_ids=ids, params=SamplingParams(max_tokens=5), priority="interactive")
                beside = core.prepare(other, lambda event: None)
                core.enqueue(beside)
                if step == 20:
                    core.step()
                    beside.cancel()
            core.step()
            core.check_integrity()
        last = events[-1]
        assert isinstance(last, Finished)
        tokens = [token for event in events if isinstance(event, TextDelta) for token in event.tokens]
        answers.append((last.token_ids, last.reason, tokens))
    return answers


def test_real_answers_are_the_ones_without_it(tiny_folder: Path, smaller: Path, kernels: KernelLibrary) -> None:
    """B15: of the model itself all drafts are right, of another few; alone, in company, after it was disturbed."""
    core = open_engine(tiny_folder, CONFIG)
    expected = told(core, disturb=False)
    core.close()
    for draft, disturb in itertools.product((tiny_folder, smaller), (False, True)):
        core = open_engine(tiny_folder, CONFIG.with_options(speculation=f"draft:{draft}"))
        assert core.intake.draft_model is not None
        core.intake.draft_model.cost = 0.0  # tried wherever it can be
        assert told(core, disturb=disturb) == expected
        statistics = core.statistics()
        drafts, right = statistics.spec_decode_num_draft_tokens, statistics.spec_decode_num_accepted_tokens
        core.close()
        assert right > 0.9 * drafts > 150 if draft is tiny_folder else drafts > 50


def test_it_drafts_for_the_static_layout_too(tiny_folder: Path, kernels: KernelLibrary) -> None:
    """Which is another rounding of the same model: most drafts are right. ONNX Runtime may round several rows otherwise than one
    (docs/providers.md), so the answers may part where two tokens are about as good as each other, and only there.
    """
    rounding = 0.2  # where it turns a quantised activation to its neighbour
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=True, top_logprobs=2)
    answers: list[list[TokenInfo]] = []
    for speculation in ("off", f"draft:{tiny_folder}"):
        core = open_engine(tiny_folder, CONFIG.with_options(layout="static", speculation=speculation))
        if core.intake.draft_model is not None:
            core.intake.draft_model.cost = 0.0
        events: list[object] = []
        core.enqueue(core.prepare(Request.completion("one two three", params), events.append))
        run(core)
        answers.append([token for event in events if isinstance(event, TextDelta) for token in event.tokens])
        last = events[-1]
        core.close()
    assert isinstance(last, Finished)
    assert last.usage.accepted_draft_tokens > 20
    for without, drafted in zip(*answers, strict=True):
        if without.chosen.token_id != drafted.chosen.token_id:
            best, second = without.alternatives
            assert drafted.chosen.token_id == second.token_id
            assert best.logprob - second.logprob < 2 * rounding
            break
        assert without.chosen.logprob == pytest.approx(drafted.chosen.logprob, abs=rounding)


def test_it_counts_as_memory(tiny_folder: Path, smaller: Path, kernels: KernelLibrary) -> None:
    config = EngineConfig(context=100, speculation=f"draft:{smaller}")
    alone = EngineConfig(context=100)
    assert usual_bytes(tiny_folder, config) > usual_bytes(tiny_folder, alone) + (smaller / "weights.bin").stat().st_size
    with pytest.raises(ParameterError, match="kv_budget_bytes is 1") as without:
        open_engine(tiny_folder, alone.with_options(kv_budget_bytes=1))
    with pytest.raises(ParameterError, match="kv_budget_bytes is 1") as with_drafts:
        open_engine(tiny_folder, config.with_options(kv_budget_bytes=1))
    needs = [int(str(raised.value).rpartition(" ")[2]) for raised in (without, with_drafts)]
    assert needs[1] > needs[0]
    core = open_engine(tiny_folder, config.with_options(kv_budget_bytes=needs[1]))
    core.close()


def test_another_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path, kernels: KernelLibrary) -> None:
    other = export(write_tiny_gguf(tmp_path / "tiny.gguf", vocab=300), tmp_path / "exported")
    with pytest.raises(ParameterError, match=r"cannot draft for .* different tokenizers"):
        open_engine(tiny_folder, EngineConfig(speculation=f"draft:{other}"))


def test_one_that_is_too_large_to_help_is_told(tiny_folder: Path, smaller: Path, kernels: KernelLibrary) -> None:
    for draft, says in ((tiny_folder, "too large"), (smaller, "")):
        core = open_engine(tiny_folder, EngineConfig(context=64, speculation=f"draft:{draft}"))
        assert says in core.info.notice
        assert bool(says) is bool(core.info.notice)
        core.close()
