"""What a request refuses; what it takes is tried by everything else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edge_llm.engine.request import MAX_TOOLS, Request
from edge_llm.errors import ParameterError
from edge_llm.messages import Message, Tool
from edge_llm.sampling.grammar import Grammar

WEATHER = Tool("weather", "The sky.", '{"type": "object", "properties": {"city": {"type": "string"}}}')
HELLO = [Message.user("Hello")]


def test_tools_are_neutral_by_default() -> None:
    request = Request.chat(HELLO)
    assert (request.tools, request.tool_choice, request.parallel_tool_calls, request.reasoning) == (
        (),
        "auto",
        True,
        None,
    )


@pytest.mark.parametrize("choice", ["none", "auto", "required", "weather"])
def test_tool_choices(choice: str) -> None:
    assert Request.chat(HELLO, tools=(WEATHER,), tool_choice=choice).tool_choice == choice


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tools": [WEATHER]}, "tuple of Tool"),
        ({"tools": ({"name": "weather"},)}, "tuple of Tool"),
        ({"tools": (WEATHER, Tool("weather"))}, "no two of one name"),
        ({"tools": tuple(Tool(f"t{i}") for i in range(MAX_TOOLS + 1))}, "at most 128 tools"),
        ({"tools": (WEATHER,), "tool_choice": "sky"}, "'sky'"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": (WEATHER,), "response_format": Grammar.json_object()}, "exclude one another"),
        ({"tools": (Tool("t", parameters="{"),)}, "parameters of the tool t: the schema is no JSON"),
        ({"tools": (Tool("t", parameters='{"type": "array"}'),)}, "schema of an object"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning": "yes"}, "reasoning"),
    ],
)
def test_tools_that_cannot_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        Request.chat(HELLO, **options)


def test_a_text_to_continue_has_no_tools() -> None:
    with pytest.raises(ParameterError, match="need messages"):
        Request.completion("Once", tools=(WEATHER,))


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "auto", "none", "required", "<|im_end|>", "naïve", "a\n"])
def test_names_of_tools_that_cannot_be(name: str) -> None:
    with pytest.raises(ParameterError, match="cannot have the name"):
        Tool(name)


def test_a_tool_is_made_of_short_texts() -> None:
    with pytest.raises(ParameterError, match="texts"):
        Tool("t", parameters={})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="description"):
        Tool("t", "x" * (1 << 15))


@pytest.mark.parametrize("value", ["high", "", None, 1, "Batch"])
def test_priorities_that_do_not_exist(value: object) -> None:
    with pytest.raises(ParameterError, match="interactive, normal, batch"):
        Request.completion("x", priority=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "5"])
def test_times_that_are_none(value: object) -> None:
    with pytest.raises(ParameterError, match="timeout_s"):
        Request.completion("x", timeout_s=value)  # type: ignore[arg-type]


def test_urgency_and_time_are_normal_and_unlimited() -> None:
    request = Request.completion("x")
    assert (request.priority, request.timeout_s) == ("normal", None)
    assert Request.completion("x", timeout_s=5, priority="batch").timeout_s == 5


def test_parameters_are_no_dict() -> None:
    params: Any = {"temperature": 0.7}
    with pytest.raises(ParameterError, match="must be SamplingParams"):
        Request.chat(HELLO, params)
