"""Tool calls and reasoning, as OpenAI's own client and others read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from edge_llm.engine.core import EngineCore
from tests.engine.fakes import make_core
from tests.engine.test_tooling import HERMES, THINK, follows, with_manifest
from tests.server.harness import Running, running

ASKED: list[Any] = [{"role": "user", "content": "Rain?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The sky.", "parameters": SCHEMA}}
]
CITIES = ["Paris", 'O"slo', "C:\\new"]
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps({"city": city}, ensure_ascii=False)}}}\n</tool_call>'
    for city in CITIES
)
SAID = f"<think>\nLook outside.\n</think>\n\nLet me see. {CALLS}"


def thinking_core() -> EngineCore:
    core = make_core(follows(SAID), context=2048, max_queued_requests=8)
    return with_manifest(core, reasoning=THINK, tool_calls=HERMES)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(thinking_core) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_calls_and_thoughts_have_fields_of_their_own(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS, temperature=0)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.model_extra["reasoning_content"].strip() == "Look outside."
    calls: Any = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather"] * 3
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": city} for city in CITIES]
    assert len({call.id for call in calls}) == 3
    assert {call.type for call in calls} == {"function"}
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert (reply.usage.completion_tokens_details.reasoning_tokens or 0) > 0


def test_a_stream_of_calls_is_put_together_by_the_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=ASKED, tools=TOOLS, temperature=0) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [json.loads(event.arguments) for event in done] == [{"city": city} for city in CITIES]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.content == "Let me see."


def test_pieces_of_calls_have_the_shape_that_clients_rely_on(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS, temperature=0, stream=True))
    thoughts = "".join((chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or "" for chunk in chunks)
    assert thoughts.strip() == "Look outside."
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    for index in range(3):
        first, *others = [piece for piece in pieces if piece.index == index]
        assert first.id
        assert (first.type, first.function.name, first.function.arguments) == ("function", "weather", "")
        assert all(piece.id is None and piece.type is None and piece.function.name is None for piece in others)
        assert json.loads("".join(piece.function.arguments for piece in others)) == {"city": CITIES[index]}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_with_the_results(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS, temperature=0)
    message = first.choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls or ()
    ]
    again = client.chat.completions.create(
        model="fake", messages=[*ASKED, message.model_dump(exclude_none=True), *results], tools=TOOLS, temperature=0
    )
    assert again.usage is not None
    assert first.usage is not None
    assert again.usage.prompt_tokens > first.usage.prompt_tokens


def test_tools_that_may_not_be_called_are_not(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=ASKED, tools=TOOLS, tool_choice="none", temperature=0, reasoning_effort="none"
    )
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tool"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://x/"}}}]}, "tool f"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(client: openai.OpenAI, options: Any, named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        client.chat.completions.create(model="fake", messages=ASKED, **options)
