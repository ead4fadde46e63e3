"""OpenAI's Responses API, as its own client reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from edge_llm.errors import SessionError
from edge_llm.model.step import Step
from tests.engine.fakes import PARIS, make_core, says
from tests.server.harness import Running, running
from tests.server.test_tools import CITIES, SCHEMA, thinking_core

TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "The sky.", "parameters": SCHEMA, "strict": False}
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(lambda: make_core(says(PARIS))) as made:
        yield made


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    with running(thinking_core) as made:
        yield made


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_response(server: Running) -> None:
    with client_of(server) as client:
        reply = client.responses.create(
            model="fake", input="capital?", instructions="Be brief.", temperature=0, metadata={"a": "b"}
        )
        assert (reply.object, reply.status, reply.output_text, reply.error) == ("response", "completed", PARIS, None)
        assert (reply.instructions, reply.temperature, reply.metadata) == ("Be brief.", 0, {"a": "b"})
        (item,) = reply.output
        assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
        assert reply.usage is not None
        assert reply.usage.output_tokens == len(PARIS.encode()) + 1
        assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
        going_on = client.responses.create(
            model="fake",
            input=[{"role": "user", "content": "capital?"}, *reply.output, {"role": "user", "content": "Sure?"}],
            instructions="Be brief.",
            temperature=0,
        )
        assert going_on.usage is not None
        assert going_on.usage.input_tokens_details.cached_tokens > 30


def test_a_response_that_was_cut_says_so(server: Running) -> None:
    with client_of(server) as client:
        reply = client.responses.create(model="fake", input="capital?", temperature=0, max_output_tokens=5)
        events = list(
            client.responses.create(model="fake", input="capital?", temperature=0, max_output_tokens=5, stream=True)
        )
    assert (reply.status, reply.output_text, reply.output[-1].status) == ("incomplete", "Paris", "incomplete")
    assert (events[-2].type, events[-2].item.status) == ("response.output_item.done", "incomplete")
    assert events[-1].response.output[-1].status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_extensions_of_the_chat_are_those_of_a_response(server: Running) -> None:
    with client_of(server) as client:
        for extension in ({"regex": "yes"}, {"choices": ["yes"]}):
            assert client.responses.create(model="fake", input="Is it?", extra_body=extension).output_text == "yes"
        reply = client.responses.create(model="fake", input="Is it?", temperature=0, extra_body={"n_predict": 2})
    assert (reply.status, reply.output_text) == ("incomplete", "Pa")


def test_a_stream_of_events(server: Running) -> None:
    with client_of(server) as client:
        events = list(client.responses.create(model="fake", input="capital?", temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == PARIS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_clients_own_stream_helper_and_logprobs(server: Running) -> None:
    options: Any = {"model": "fake", "input": "capital?", "temperature": 0, "top_logprobs": 2}
    with client_of(server) as client:
        with client.responses.stream(**options, include=["message.output_text.logprobs"]) as stream:
            for _ in stream:
                pass
            final = stream.get_final_response()
        whole = client.responses.create(**options, include=["message.output_text.logprobs"])
    for reply in (final, whole):
        assert reply.output_text == PARIS
        part: Any = reply.output[0].content[0]  # type: ignore[union-attr]
        assert bytes(byte for token in part.logprobs for byte in token.bytes).decode() == PARIS
        assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_are_items(thinker: Running, stream: bool) -> None:
    options: Any = {"model": "fake", "input": "Rain?", "tools": TOOLS, "temperature": 0}
    with client_of(thinker) as client:
        if stream:
            with client.responses.stream(**options) as events:
                told = list(events)
                reply = events.get_final_response()
            calls = [event for event in told if event.type == "response.function_call_arguments.done"]
            assert [json.loads(event.arguments) for event in calls] == [{"city": city} for city in CITIES]
        else:
            reply = client.responses.create(**options)
        assert [item.type for item in reply.output] == ["reasoning", "message", *["function_call"] * 3]
        assert reply.output_text == "Let me see."
        made = [item for item in reply.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in made] == [{"city": city} for city in CITIES]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in made
        ]
        asked: list[Any] = [{"role": "user", "content": "Rain?"}]
        again = client.responses.create(
            model="fake", input=[*asked, *reply.output, *results], tools=TOOLS, temperature=0, max_output_tokens=4
        )
        assert again.usage is not None
        assert reply.usage is not None
        assert again.usage.input_tokens > reply.usage.input_tokens


def test_a_stream_that_fails_ends_with_the_failure() -> None:
    core = make_core(says(PARIS))
    steps = iter(range(100))

    def fail(_step: Step) -> None:
        if next(steps) == 3:
            raise SessionError("the step failed")

    core.session.before_step = fail
    with running(lambda: core) as server, client_of(server) as client:
        *_, last = client.responses.create(model="fake", input="capital?", stream=True)
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.message == "the step failed"


@pytest.mark.parametrize(
    "options",
    [
        {"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "c"}, {"prompt": {"id": "p"}},
        {"text": {"verbosity": "low"}}, {"tools": [{"type": "web_search"}]}, {"max_tool_calls": 1},
        {"input": [{"type": "item_reference", "id": "x"}]}, {"input": []}, {"input": [{"type": "reasoning"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/"}]}]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "http://127.0.0.1:1/"}}}},
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(server: Running, options: dict[str, Any]) -> None:
    with client_of(server) as client, pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "fake", "input": "x", "extra_body": options})
    assert caught.value.param is not None
