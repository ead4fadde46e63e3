"""Forced calls are valid in every syntax, whatever the model wants; calls that it begins by itself are, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import Request
from edge_llm.engine.tool_grammar import MAX_FORCED_CALLS, tool_grammar
from edge_llm.errors import ParameterError
from edge_llm.messages import Finished, FinishReason, Message, ReasoningDelta, Tool
from edge_llm.sampling.decoders import mask_without
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from edge_llm.text.tool_syntax import GENERIC, CallForm, ToolSyntax
from tests.engine.fakes import END, VOCAB, byte_ids, hashed_logits, make_core, says, text_of
from tests.engine.test_tooling import HERMES, THINK, answer, follows, with_manifest

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "東京", 'a"b\\c']},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 1},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "object", "properties": {"n": {"enum": [1, None]}}, "additionalProperties": False}},
}
WEATHER = Tool("weather", "The sky.", json.dumps(SCHEMA))
NOW = Tool("now")
LIKE = Tool(
    "like", "", '{"type": "object", "properties": {"a": {"enum": [true]}, "b": {"enum": [1]}, "c": {"enum": ["x"]}}}'
)
STYLES: dict[str, dict[str, str]] = {
    "in words": {},
    "hermes": HERMES,
    "mistral": {"begin": "[TOOL_CALLS]", "end": ""},
    "llama": {"begin": "", "end": "", "arguments": "parameters"},
    "lfm": {"form": "pythonic", "begin": "<|tool_call_start|>", "end": "<|tool_call_end|>"},
    "pythonic": {"form": "pythonic", "begin": "", "end": ""},
    "a token of its own": {"begin": "<|endoftext|>", "end": ""},
}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\\n' }}"


@pytest.fixture(params=STYLES)
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    made = with_manifest(
        make_core(hashed_logits, context=2048, eos=(END,)), template=PLAIN, eos=(END,), tool_calls=STYLES[request.param]
    )
    yield made
    made.close()


def hot(seed: int, **options: Any) -> Request:
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=900)
    return Request.chat([Message.user("Rain?")], params, tools=(WEATHER, NOW, LIKE), **options)


def test_a_random_model_makes_valid_calls(core: EngineCore) -> None:
    schemas = {tool.name: json.loads(tool.parameters) for tool in (WEATHER, NOW, LIKE)}
    names = set()
    for seed in range(8):
        for choice in ("required", "weather"):
            events = answer(core, hot(seed, tool_choice=choice))
            finished = events[-1]
            assert isinstance(finished, Finished)
            assert (finished.reason, text_of(events), finished.invalid_tool_calls) == (FinishReason.TOOL_CALLS, "", 0)
            assert 1 <= len(finished.tool_calls) <= (1 if choice == "weather" else MAX_FORCED_CALLS)
            for call in finished.tool_calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
                names.add(call.name)
    assert {"weather"} < names


@pytest.mark.parametrize("style", ["in words", "lfm", "mistral"])
def test_a_call_that_was_begun_becomes_valid(style: str) -> None:
    """Whatever the model would have written after the marker, and the text before it stays what it was."""
    syntax = ToolSyntax.of(STYLES[style]) or GENERIC
    said = f"Wait: {syntax.begin}oops"
    core = with_manifest(make_core(says(said), context=2048), template=PLAIN, tool_calls=STYLES[style])
    events = answer(core, hot(1, tool_choice="auto"))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert text_of(events).startswith("Wait:")
    assert finished.tool_calls
    assert finished.invalid_tool_calls == 0
    core.close()


def test_what_a_token_says_behind_the_marker_belongs_to_the_call() -> None:
    """`>hello` is one token here: the call begins inside it, or does not."""
    hello = VOCAB - 4
    core = with_manifest(
        make_core(says([*byte_ids("<tool_cal"), *byte_ids("l>"), hello]), context=2048), template=PLAIN
    )
    finished = answer(core, hot(1))[-1]
    assert isinstance(finished, Finished)
    assert finished.tool_calls
    core.close()


@pytest.mark.parametrize("style", ["in words", "lfm"])
def test_speculation_changes_no_call(style: str) -> None:
    """Drafts run into the marker and past it: what comes is what came without them."""
    begin = (ToolSyntax.of(STYLES[style]) or GENERIC).begin
    said = f"A long text that is told twice over, and then {begin}oops, and more of it after that."
    answers = []
    for speculates in (False, True):
        core = with_manifest(
            make_core(follows(said), context=2048),
            template=PLAIN,
            tool_calls=STYLES[style],
            speculates=speculates,
            eos=(END,),
        )
        params = SamplingParams(temperature=0, max_tokens=400)
        finished = answer(core, Request.chat([Message.user(f"{said} {said}")], params, tools=(NOW, LIKE)))[-1]
        assert isinstance(finished, Finished)
        assert (finished.usage.accepted_draft_tokens > 0) is speculates
        answers.append((finished.token_ids, [(call.name, call.arguments) for call in finished.tool_calls]))
        core.close()
    assert answers[0] == answers[1]
    assert answers[0][1]


def test_without_a_marker_auto_is_sampled_as_ever() -> None:
    core = make_core(hashed_logits, context=2048)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
    request = Request.chat([Message.user("Rain?")], params, tools=(NOW,))
    with_tools = answer(core, request)[-1]
    without = answer(core, Request(token_ids=tuple(core.intake.prompt(request)[0]), params=params))[-1]
    assert isinstance(with_tools, Finished)
    assert isinstance(without, Finished)
    assert with_tools.token_ids == without.token_ids
    core.close()


@pytest.mark.parametrize("form", ["calls", "json"])
def test_a_grammar_waits_until_reasoning_ends(form: str) -> None:
    """The template opens the reasoning: it may be anything but an end, then comes what was asked for."""
    core = with_manifest(make_core(hashed_logits, context=2048), template=PLAIN + "<think>\n", reasoning=THINK)
    options: dict[str, Any] = {"tools": (NOW,), "tool_choice": "required"}
    if form == "json":
        options = {"response_format": Grammar.json_schema({"const": {"a": 1}})}
    request = Request.chat([Message.user("Rain?")], SamplingParams(temperature=0, max_tokens=400), **options)
    start = len(core.intake.prompt(request)[0])
    thought = byte_ids("Hm")
    script = [*thought, END, *byte_ids("</think>")]

    def model(ids: list[int]) -> Any:
        said = len(ids) - start
        row = np.zeros(VOCAB, np.float32)
        if said < len(script):
            row[script[said]] = 30.0
            row[byte_ids(".")[0]] = 10.0  # in place of the end that is not allowed
        return row

    core.session.model = model  # type: ignore[attr-defined]
    events = answer(core, request)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "Hm."
    if form == "json":
        assert (text_of(events), finished.reason) == ('{"a": 1}', FinishReason.STOP)
    else:
        assert [call.name for call in finished.tool_calls] == ["now"]
    core.close()


def test_schemas_that_cannot_be_kept() -> None:
    core = make_core(says("Hello"), context=2048)
    odd = Tool("odd", "", '{"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}')
    messages = [Message.user("Rain?")]
    with pytest.raises(
        ParameterError, match=r"^tool_choice required cannot be kept: the parameters of the tool odd: .*uniq"
    ):
        core.prepare(Request.chat(messages, tools=(odd,), tool_choice="required"), lambda event: None)
    many = tuple(Tool(f"t{n}", "", json.dumps({"description": "x" * 60_000})) for n in range(2))
    with pytest.raises(ParameterError, match="bytes"):
        tool_grammar(many, GENERIC, {}, several=False)
    assert text_of(answer(core, Request.chat(messages, tools=(odd,)))) == "Hello"
    core.close()


def test_names_that_python_cannot_write() -> None:
    tool = Tool("t", "", '{"type": "object", "properties": {"a b": {}}}')
    with pytest.raises(ParameterError, match="cannot write"):
        tool_grammar([tool], ToolSyntax(CallForm.PYTHONIC, "", ""), {}, several=False)


def test_a_mask_leaves_out_what_it_is_told() -> None:
    mask = np.unpackbits(mask_without([0, 33], 40).view(np.uint8), bitorder="little")
    assert np.flatnonzero(mask[:40] == 0).tolist() == [0, 33]
    assert mask.size == 64
    assert not mask[40:].any()
