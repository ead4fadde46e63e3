"""What the engine does with rows that are there already: fewer rows to compute, the same answers, true counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_llm.cache.block_folder import clear_folder
from edge_llm.config import EngineConfig
from edge_llm.engine.core import EngineCore
from edge_llm.engine.engine import Engine
from edge_llm.engine.request import Request
from edge_llm.errors import ParameterError, SessionError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Message, Role, TextDelta, TokenInfo
from edge_llm.sampling.params import SamplingParams
from tests.cache.faulty_os import faulty
from tests.engine.fakes import PARIS, make_core, says, tokenizer
from tests.engine.test_core import Asked, ask, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def request(core: EngineCore, asked: Request) -> Asked:
    events: list[object] = []
    sequence = core.prepare(asked, events.append)
    core.enqueue(sequence)
    return Asked(sequence, events)


def answered(core: EngineCore, asked: Request) -> Asked:
    result = request(core, asked)
    run(core)
    return result


def rows(core: EngineCore) -> int:
    """Rows computed since this was last asked."""
    computed = sum(step.rows for step in core.session.steps)
    core.session.steps.clear()
    return computed


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_a_prompt_is_read_once(length: int) -> None:
    """B23 at and beside whole blocks: the same answer, from one row."""
    core = make_core()
    first = ask(core, length, max_tokens=5)
    run(core)
    assert (first.finished.usage.cached_tokens, rows(core)) == (0, length + 4)
    again = ask(core, length, max_tokens=5)
    run(core)
    assert again.finished.token_ids == first.finished.token_ids
    assert (again.finished.usage.cached_tokens, rows(core)) == (length - 1, 5)


@pytest.mark.parametrize("shared", [0, 1, 63, 64, 65, 100])
def test_a_common_prefix_with_different_ends(shared: int) -> None:
    """B23: whatever is left in the slots, an answer is the one of an engine that has seen nothing."""
    ids = [3 + i * i % 200 for i in range(shared)]
    core = make_core(slots=2)
    for end in (5, 6, 7, 5):
        prompt = Request(token_ids=(*ids, end, *range(20, 30)), params=GREEDY)
        found = answered(core, prompt)
        assert found.finished.token_ids == answered(make_core(), prompt).finished.token_ids
        if end != 5:
            assert found.finished.usage.cached_tokens == shared
    assert found.finished.usage.cached_tokens >= shared


def test_a_chat_goes_on_with_its_own_tokens() -> None:
    """The answer is replayed as it was sampled: nothing but the new turn is read."""
    core = make_core(says(PARIS), context=512)
    first = answered(core, Request.chat([Message.user("hello world")], SamplingParams(temperature=0.0)))
    rows(core)
    text = "".join(getattr(event, "text", "") for event in first.events)
    reply = Message(Role.ASSISTANT, text, token_ids=first.finished.token_ids, tokenizer_digest=tokenizer().digest)
    turn = "and then?"
    second = answered(
        core, Request.chat([Message.user("hello world"), reply, Message.user(turn)], SamplingParams(temperature=0.0))
    )
    usage = second.finished.usage
    said = first.finished.usage.prompt_tokens + len(first.finished.token_ids)
    assert usage.cached_tokens >= said - 1
    assert rows(core) == usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1


def test_a_prompt_that_others_are_reading_is_not_read_twice() -> None:
    core = make_core(slots=4, max_rows=64)
    prompt = Request(token_ids=tuple(3 + i * i % 200 for i in range(200)), params=replace(GREEDY, max_tokens=1))
    alone = answered(make_core(), prompt).finished.token_ids
    asked = [request(core, prompt) for _ in range(4)]
    run(core)
    assert [one.finished.token_ids for one in asked] == [alone] * 4
    assert rows(core) < 200 + 3 * 64
    assert sum(200 - one.finished.usage.cached_tokens for one in asked) < 200 + 3 * 64


def test_a_request_may_want_none_of_it() -> None:
    core = make_core(slots=3)
    ids = tuple(range(3, 80))
    answered(core, Request(token_ids=ids, params=GREEDY, cache=False))
    assert answered(core, Request(token_ids=ids, params=GREEDY)).finished.usage.cached_tokens == 0
    for other in ({"cache": False}, {"namespace": "other"}):
        assert answered(core, Request(token_ids=ids, params=GREEDY, **other)).finished.usage.cached_tokens == 0
    assert answered(core, Request(token_ids=ids, params=GREEDY)).finished.usage.cached_tokens == 76
    for bad in ({"cache": 1}, {"namespace": None}, {"owner": None}):
        with pytest.raises(ParameterError):
            Request(token_ids=ids, **bad)


def test_an_engine_without_keeps_nothing() -> None:
    core = make_core(prefix_cache="off")
    for _ in range(2):
        assert ask(core, 70, max_tokens=2).sequence
        run(core)
        assert core.cache.used_bytes == 0
    assert rows(core) == 142


def test_after_a_failed_step_nothing_of_it_is_found() -> None:
    core = make_core()

    def fail(step: object) -> None:
        raise SessionError("broken")

    core.session.before_step = fail
    asked = ask(core, 70, max_tokens=5)
    run(core)
    assert isinstance(asked.last, SessionError)
    core.session.before_step = lambda step: None
    again = ask(core, 70, max_tokens=5)
    run(core)
    assert again.finished.usage.cached_tokens == 0


def test_what_a_cancelled_answer_has_read_is_found() -> None:
    core = make_core(max_rows=16)
    asked = ask(core, 60, max_tokens=5)
    core.step()
    core.step()
    asked.sequence.cancel()
    run(core)
    again = ask(core, 60, max_tokens=5)
    run(core)
    assert again.finished.usage.cached_tokens == 32


def test_a_conversation_that_slides_goes_on() -> None:
    core = make_core(context=128, max_rows=16, slots=2, context_policy="slide")
    ids = tuple(3 + i * i % 200 for i in range(300))
    first = answered(core, Request(token_ids=ids, params=GREEDY)).finished
    longer = Request(token_ids=(*ids, *first.token_ids, 9, 9), params=GREEDY)
    second = answered(core, longer).finished
    assert second.usage.cached_tokens == 311
    cold = answered(make_core(context=128, max_rows=16, context_policy="slide"), longer).finished
    assert (second.token_ids, second.forgotten_tokens) == (cold.token_ids, cold.forgotten_tokens)


# --- across processes: each engine here is one that knows nothing of the others but the folder -------------------------


def served(folder: Path | None, asked: Request, **options: object) -> Asked:
    """What a new engine answers; it is closed afterwards."""
    core = make_core(folder=folder, **{"context": 512, **options})
    result = answered(core, asked)
    core.close()
    return result


@pytest.mark.parametrize("length", [2, 63, 64, 65, 128, 129, 200])
def test_a_prompt_is_found_after_a_restart(tmp_path: Path, length: int) -> None:
    """B23, B24: in whole blocks, or all of it if no whole block hides its end among the answer; the answer is the same."""
    asked = Request(token_ids=tuple(3 + i * i % 200 for i in range(length)), params=GREEDY)
    first, again = served(tmp_path / "p", asked), served(tmp_path / "p", asked)
    assert again.finished.token_ids == first.finished.token_ids
    ends_in_rest = (length + 11) // 64 == (length - 1) // 64  # the row of the last token is never computed
    assert again.finished.usage.cached_tokens == (length - 1 if ends_in_rest else (length - 1) // 64 * 64)


@pytest.mark.parametrize("length", [5, 60, 64, 100, 150])
def test_a_conversation_goes_on_after_a_restart(tmp_path: Path, length: int) -> None:
    """B24: every row of it is found, those of the last block too."""
    ids = tuple(3 + i * i % 200 for i in range(length))
    first = served(tmp_path / "p", Request(token_ids=ids, params=GREEDY))
    longer = Request(token_ids=(*ids, *first.finished.token_ids, 7, 8), params=GREEDY)
    second = served(tmp_path / "p", longer)
    assert second.finished.usage.cached_tokens == length + 11
    assert second.finished.token_ids == served(None, longer).finished.token_ids
    # and a third time, from blocks of which the first engine and the second have each written some
    again = (*longer.token_ids, *second.finished.token_ids, 9)
    third = served(tmp_path / "p", Request(token_ids=again, params=GREEDY))
    assert third.finished.usage.cached_tokens == len(again) - 2


def test_rows_past_the_context_are_not_stored(tmp_path: Path) -> None:
    """They depend on how long the context is: an engine with another one must not find them."""
    ids = tuple(3 + i * i % 200 for i in range(300))
    asked = Request(token_ids=ids, params=GREEDY, context_policy="slide")
    served(tmp_path / "p", asked, context=128)
    again = served(tmp_path / "p", asked, context=256)
    assert again.finished.usage.cached_tokens == 128
    assert again.finished.token_ids == served(None, asked, context=256).finished.token_ids
    assert served(tmp_path / "p", asked, context=128).finished.usage.cached_tokens == 128


def test_what_a_request_does_not_share_is_not_stored(tmp_path: Path) -> None:
    """F29, B60: no file without leave, and none of another namespace is found."""
    ids = tuple(range(3, 103))
    core = make_core(folder=tmp_path / "p", context=512)
    answered(core, Request(token_ids=ids, params=GREEDY, cache=False))
    core.close()
    assert not any((tmp_path / "p").iterdir())
    for i in range(25):
        name = f"key {i}"
        asked = Request(token_ids=ids, params=GREEDY, namespace=name)
        assert served(tmp_path / "p", asked).finished.usage.cached_tokens == 0
        assert served(tmp_path / "p", asked).finished.usage.cached_tokens == 99
    assert not [path for path in (tmp_path / "p").iterdir() if b"key 0" in path.read_bytes()]


def test_a_disk_that_fails_fails_no_request(tmp_path: Path) -> None:
    """F4: whichever call of the system fails while a request is served, its answer is the same."""
    asked = Request(token_ids=tuple(range(3, 150)), params=GREEDY)
    expected = served(None, asked).finished.token_ids
    served(tmp_path / "p", asked)
    for at in range(1, 60):
        core = make_core(folder=tmp_path / "p", context=512)
        with faulty(at, [28, 5, 24, 13][at % 4]):
            assert answered(core, asked).finished.token_ids == expected
            core.close()
        if at % 10 == 0:
            clear_folder(tmp_path / "p")


# --- over real kernels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", ["int8", "f32"])
def test_a_hit_gives_the_bits_of_a_miss(
    tiny_folder: Path, kernels: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_type: str
) -> None:
    """B23: log-probabilities and all, from memory and from disk, at block edges, after common prefixes, across a slide."""
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "home"))
    config = EngineConfig(context=256, slots=2, kv_type=kv_type, max_chunk=50, context_policy="slide")
    params = SamplingParams(max_tokens=5, temperature=0.9, seed=3, ignore_eos=True, logprobs=True, top_logprobs=2)
    ids = [3 + i * i % 300 for i in range(400)]
    prompts = [ids[:n] for n in (63, 64, 65, 130, 130, 400, 400)] + [[*ids, 9, 9], [*ids[:100], 7, 8]]

    def said(engine: Engine, prompt: list[int]) -> tuple[list[TokenInfo], int]:
        handle = engine.submit(Request(token_ids=tuple(prompt), params=params))
        reports = [token for event in handle if isinstance(event, TextDelta) for token in event.tokens]
        assert handle.finished is not None
        return reports, handle.finished.usage.cached_tokens

    with Engine.open(tiny_folder, config.with_options(prefix_cache="off")) as engine:
        cold = [said(engine, prompt) for prompt in prompts]
    with Engine.open(tiny_folder, config.with_options(prefix_cache="disk")) as engine:
        warm = [said(engine, prompt) for prompt in prompts]
    with Engine.open(tiny_folder, config.with_options(prefix_cache="disk")) as engine:
        restored = [said(engine, prompt) for prompt in reversed(prompts)]
    assert [reports for reports, _ in warm] == [reports for reports, _ in cold]
    assert [reports for reports, _ in reversed(restored)] == [reports for reports, _ in cold]
    assert not any(found for _, found in cold)
    assert [found for _, found in warm[:7]] == [0, 63, 64, 65, 129, 130, 399]
    assert warm[7][1] == 400
    assert warm[8][1] >= 64  # a slot that has slid does not have its first rows any more, the disk does
    assert restored[1][1] == 256


def test_a_folder_that_cannot_be_had_costs_the_cache_only(
    tiny_folder: Path, kernels: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "cache").mkdir(parents=True)
    (tmp_path / "home" / "cache" / "prefixes").touch()
    with Engine.open(tiny_folder, EngineConfig(context=256, prefix_cache="disk")) as engine:
        assert engine.complete("hello", GREEDY).text()


@pytest.mark.real_model
def test_a_new_turn_costs_itself(smollm2_folder: Path, kernels: KernelLibrary) -> None:
    """A chat goes on in one step, whose rows are the new turn and what the template writes around it."""
    params = SamplingParams(max_tokens=30, temperature=0)
    question = [Message.user("Name three rivers of Europe.")]
    with Engine.open(smollm2_folder, EngineConfig(context=2048)) as engine:
        handle = engine.chat(question, params)
        reply = engine.reply(handle.text(), handle.finished)
        turn = Message.user("And three of Asia?")
        handle = engine.chat([*question, reply, turn], params)
        handle.text()
        usage = handle.finished.usage
    scaffold = (
        3 + 3 + 2 + 3
    )  # the answer's last token, <|im_end|> \n, <|im_start|>user \n, <|im_end|> \n, and the next header
    new = usage.prompt_tokens - usage.cached_tokens
    assert usage.cached_tokens > 60
    assert new <= 5 + scaffold + 1
