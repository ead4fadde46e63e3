"""Tools and reasoning in an engine: what the model is told, what its answer becomes; B29."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_llm.engine.core import EngineCore
from edge_llm.engine.draft_model import DraftModel
from edge_llm.engine.intake import Intake
from edge_llm.engine.request import Request
from edge_llm.engine.window import ContextWindow
from edge_llm.errors import EdgeLLMError, ModelFormatError
from edge_llm.messages import (
    Event,
    Finished,
    FinishReason,
    Message,
    ReasoningDelta,
    Role,
    Tool,
    ToolCall,
    ToolCallDelta,
)
from edge_llm.sampling.params import SamplingParams
from edge_llm.text.chat_template import ChatTemplate
from tests.engine.fakes import END, FakeSampler, NextToken, byte_ids, make_core, manifest, says, text_of, tokenizer

TEMPLATES = Path(__file__).parents[1] / "golden" / "templates"
THINKING = (TEMPLATES / "thinking.jinja").read_text(encoding="utf-8")
THINK = {"begin": "<think>", "end": "</think>"}
HERMES = {"form": "json", "begin": "<tool_call>", "end": "</tool_call>", "arguments": "arguments"}
WEATHER = Tool("weather", "The sky.", '{"type": "object", "properties": {"city": {"type": "string"}}}')
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def intake(
    template: str = THINKING, *, speculates: bool = False, draft_model: DraftModel | None = None, **changes: Any
) -> Intake:
    return Intake(
        manifest(**changes),
        tokenizer(),
        ChatTemplate(template),
        sampler=FakeSampler(),  # type: ignore[arg-type]
        window=ContextWindow(4096),
        policy="error",
        speculates=speculates,
        draft_model=draft_model,
    )


def with_manifest(core: EngineCore, **changes: Any) -> EngineCore:
    """The engine, for a model whose manifest says more."""
    core.intake = intake(**changes)
    return core


def answer(core: EngineCore, request: Request) -> list[Event]:
    events: list[Event | EdgeLLMError] = []
    core.enqueue(core.prepare(request, events.append))
    while core.has_work:
        core.step()
    assert isinstance(events[-1], Finished), events[-1]
    return events  # type: ignore[return-value]


def ask(**options: Any) -> Request:
    return Request.chat([Message.user("Rain?")], SamplingParams(temperature=0, max_tokens=300), **options)


def follows(said: str) -> NextToken:
    """A model that says this, whatever tokens what it said so far is made of."""

    def following(ids: list[int]) -> int:
        told = tokenizer().decode(ids).rpartition("assistant\n")[2]
        rest = said.removeprefix(told) if said.startswith(told) else ""
        return byte_ids(rest)[0] if rest else END

    return following


def prompt_text(core: Intake, request: Request) -> str:
    return core.tokenizer.decode(core.prompt(request)[0], skip_special=False)


def test_a_call_in_an_answer() -> None:
    core = make_core(follows(f"Wait.\n{CALL}"), context=2048)
    events = answer(core, ask(tools=(WEATHER,)))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.TOOL_CALLS
    assert text_of(events) == "Wait."
    (call,) = finished.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert [e for e in events if isinstance(e, ToolCallDelta)] == [ToolCallDelta(0, call.arguments, call.id, "weather")]
    core.close()


@pytest.mark.parametrize("options", [{}, {"tools": (WEATHER,), "tool_choice": "none"}])
def test_without_tools_calls_are_text(options: dict[str, Any]) -> None:
    core = make_core(says(CALL), context=2048)
    events = answer(core, ask(**options))
    assert text_of(events) == CALL
    assert events[-1].reason is FinishReason.STOP  # type: ignore[union-attr]
    core.close()


def test_calls_that_cannot_be_read_are_text_and_counted() -> None:
    """A schema that no grammar can rule: then what the model makes of it is read as it is."""
    odd = Tool("odd", "", '{"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}')
    core = make_core(follows("<tool_call>{]</tool_call>"), context=2048)
    events = answer(core, ask(tools=(odd,)))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert text_of(events) == "<tool_call>{]</tool_call>"
    assert (finished.reason, finished.invalid_tool_calls) == (FinishReason.STOP, 1)
    core.close()


def test_a_marker_that_is_a_special_token_is_seen_where_it_is_looked_for() -> None:
    """Special tokens are silent else."""
    special, body = 0, byte_ids('[{"name": "weather"}]')
    spec = {"begin": "<|endoftext|>", "end": ""}
    for tools, calls, text in (((Tool("weather"),), 1, ""), ((), 0, 'Hm[{"name": "weather"}]')):
        core = with_manifest(
            make_core(says([*byte_ids("Hm") * (not tools), special, *body]), context=2048), tool_calls=spec, eos=(END,)
        )
        events = answer(core, ask(tools=tools))
        assert len(events[-1].tool_calls) == calls  # type: ignore[union-attr]
        assert text_of(events) == text
        core.close()


def test_an_answer_may_hold_one_call_only() -> None:
    calls = "".join(CALL.replace("Paris", city) for city in ("Paris", "Tunis", "Florence"))
    core = make_core(follows(calls), context=2048)
    many = answer(core, ask(tools=(WEATHER,)))[-1]
    one = answer(core, ask(tools=(WEATHER,), parallel_tool_calls=False))[-1]
    assert isinstance(many, Finished)
    assert isinstance(one, Finished)
    assert (len(many.tool_calls), len(one.tool_calls)) == (3, 1)
    assert one.reason is FinishReason.TOOL_CALLS
    assert len({call.id for call in many.tool_calls + one.tool_calls}) == 4
    core.close()


def test_an_answer_ends_where_it_repeats_a_call() -> None:
    core = make_core(follows(CALL * 30), context=2048)
    finished = answer(core, ask(tools=(WEATHER,)))[-1]
    assert isinstance(finished, Finished)
    assert (len(finished.tool_calls), finished.reason) == (1, FinishReason.TOOL_CALLS)
    assert finished.usage.completion_tokens < 2 * len(CALL)
    core.close()


def test_templates_that_know_tools_get_them() -> None:
    native, worded = intake(tool_calls=HERMES), intake()
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in prompt_text(native, ask(tools=(WEATHER,)))
    assert "# Functions" in prompt_text(worded, ask(tools=(WEATHER,)))
    for made in (native, worded):
        assert "weather" not in prompt_text(made, ask(tools=(WEATHER,), tool_choice="none"))


def test_the_model_s_system_prompt_stays_before_its_tools() -> None:
    text = prompt_text(intake(system_prompt="You are small."), ask(tools=(WEATHER,)))
    assert text.startswith("<|im_start|>system\nYou are small.\n\n# Functions")


def test_reasoning_is_split_and_counted() -> None:
    core = with_manifest(make_core(says("<think>\nHm.\n</think>\n\nNo."), context=2048), reasoning=THINK)
    events = answer(core, ask())
    assert text_of(events) == "No."
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "Hm."
    assert 0 < events[-1].usage.reasoning_tokens < events[-1].usage.completion_tokens  # type: ignore[union-attr]
    core.close()


@pytest.mark.parametrize("wanted", [True, False, None])
def test_reasoning_is_switched_by_the_template(wanted: bool | None) -> None:
    text = prompt_text(intake(reasoning=THINK), ask(reasoning=wanted))
    assert text.endswith("<think>\n\n</think>\n\n") is (wanted is False)
    plain = intake("{{ messages[0].content }}", reasoning=THINK)
    assert prompt_text(plain, ask(reasoning=wanted)) == "Rain?"


def test_a_template_that_opens_reasoning() -> None:
    opened = "{{ messages[0].content }}<|im_start|>assistant\n<think>\n"
    core = with_manifest(make_core(says("unused"), context=2048), template=opened, reasoning=THINK)
    said = "Hm.</think>No."
    start = len(core.intake.prompt(ask())[0])
    core.session.model = says_after(start, said)  # type: ignore[attr-defined]
    assert text_of(answer(core, ask())) == "No."
    core.close()


def says_after(start: int, said: str) -> Any:

    tokens = [*byte_ids(said), END]
    return lambda ids: tokens[min(len(ids) - start, len(tokens) - 1)]


def test_b29_reasoning_is_not_fed_back() -> None:
    """Three turns: earlier thoughts are not shown again, no empty block is added, and the real common prefix is reused."""
    core = with_manifest(make_core(says("<think>\nHm.\n</think>\n\nNo."), context=2048), reasoning=THINK)
    messages = [Message.user("Rain?")]
    params = SamplingParams(temperature=0)
    before: list[int] = []
    for turn in range(3):
        request = Request.chat(messages, params)
        ids = core.intake.prompt(request)[0]
        assert "think" not in core.intake.tokenizer.decode(ids, skip_special=False)
        events = answer(core, request)
        finished = events[-1]
        assert isinstance(finished, Finished)
        common = next(
            (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids))
        )
        assert finished.usage.cached_tokens == min(common, len(ids) - 1)
        assert turn == 0 or finished.usage.cached_tokens > 0
        before = [*ids, *finished.token_ids]
        digest = core.intake.tokenizer.digest
        said = Message(Role.ASSISTANT, text_of(events), token_ids=finished.token_ids, tokenizer_digest=digest)
        messages += [said, Message.user("Sure?")]
    core.close()


def test_places_of_messages_told_in_words() -> None:
    """What slides out of the context is told by the request's own messages."""
    call = ToolCall("call00001", "weather", "{}")
    messages = [
        Message.user("Rain?"),
        Message(Role.ASSISTANT, "", tool_calls=(call, call)),
        Message(Role.TOOL, "dry"),
        Message(Role.TOOL, "wet"),
        Message.user("So?"),
    ]
    made = intake("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    request = Request.chat(messages, tools=(WEATHER,), context_policy="slide")
    ids, places = made.prompt(request)
    texts = [made.tokenizer.decode(ids[place.start : place.stop]) for place in places]
    assert texts[0] == "Rain?"
    assert texts[1].startswith("<tool_call>")
    assert texts[2] == texts[3] == "<tool_response>\ndry\n</tool_response>\n<tool_response>\nwet\n</tool_response>"
    assert texts[4] == "So?"


@pytest.mark.parametrize(
    "changes", [{"tool_calls": {"form": "xml"}}, {"tool_calls": {"colour": "x"}}, {"reasoning": {"begin": "x"}}]
)
def test_a_manifest_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError, match="tool_calls"):
        intake(**changes)
