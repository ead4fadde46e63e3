"""OpenAI's own client against the server: what it reads is what was said."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.client import ThreadClient
from edge_llm.kernels.warmup import KernelLibrary
from tests.engine.fakes import PARIS, VOCAB, make_core, says
from tests.server.harness import Running, running

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(lambda: make_core(says(PARIS), context=200, max_queued_requests=8)) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_an_answer_is_whole(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=CHAT, temperature=0)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "fake"
    (choice,) = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", PARIS, None)
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens == len(PARIS.encode()) + 1
    again = client.chat.completions.create(model="fake", messages=CHAT, temperature=0)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1
    timings = again.model_extra["timings"]
    assert timings["cache_n"] == reply.usage.prompt_tokens - 1
    assert timings["prompt_n"] == 1
    assert timings["predicted_n"] == reply.usage.completion_tokens


def test_a_stream_is_the_same_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="fake", messages=CHAT, temperature=0, stream=True))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].delta.model_dump(exclude_none=True) == {}


def test_usage_comes_last_in_a_chunk_without_choices_and_only_when_asked(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=CHAT, stream=True, stream_options={"include_usage": True}, max_completion_tokens=3
    )
    *others, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 3
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in others)
    assert others[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("limit", [{"max_tokens": 4}, {"max_completion_tokens": 4}, {"extra_body": {"n_predict": 4}},
                                   {"max_tokens": 9, "max_completion_tokens": 4}])  # fmt: skip
def test_both_names_of_the_limit(client: openai.OpenAI, limit: dict[str, Any]) -> None:
    reply = client.chat.completions.create(model="fake", messages=CHAT, temperature=0, **limit)
    assert reply.choices[0].message.content == "Pari"
    assert reply.choices[0].finish_reason == "length"


def test_stops_end_the_answer_and_are_not_shown(client: openai.OpenAI) -> None:
    for stop in ("東", ["zz", "東"]):
        reply = client.chat.completions.create(model="fake", messages=CHAT, temperature=0, stop=stop)
        assert reply.choices[0].message.content == "Paris — "
        assert reply.choices[0].finish_reason == "stop"


def test_logprobs_give_the_bytes_of_parts_of_characters(client: openai.OpenAI) -> None:
    """B52: `logprobs` without `top_logprobs`, and tokens that are half a character."""
    reply = client.chat.completions.create(model="fake", messages=CHAT, temperature=0, logprobs=True)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(byte for token in logprobs.content for byte in token.bytes or ()).decode() == PARIS
    assert all(token.top_logprobs == [] for token in logprobs.content)
    assert all(-9999 <= token.logprob <= 0 for token in logprobs.content)
    assert logprobs.refusal is None

    stream = client.chat.completions.create(
        model="fake", messages=CHAT, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
    assert bytes(byte for token in tokens for byte in token.bytes or ()).decode() == PARIS
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    assert all(token.top_logprobs[0].token == token.token for token in tokens)


def test_n_answers_are_seeds_in_a_row(client: openai.OpenAI) -> None:
    options: Any = {"model": "fake", "messages": CHAT, "temperature": 5, "max_tokens": 12, "logprobs": True}
    three = client.chat.completions.create(**options, n=3, seed=2**64 - 2)

    def ids(choice: Any) -> list[list[int]]:
        return [token.bytes for token in choice.logprobs.content]

    assert [choice.index for choice in three.choices] == [0, 1, 2]
    for choice, seed in zip(three.choices, (2**64 - 2, 2**64 - 1, 0), strict=True):
        alone = client.chat.completions.create(**options, seed=seed)
        assert ids(alone.choices[0]) == ids(choice)
    assert three.usage is not None
    assert three.usage.completion_tokens == 36
    unseeded = client.chat.completions.create(**options, n=2)
    again = client.chat.completions.create(**options, n=2, seed=unseeded.model_extra["seed"])
    assert [ids(choice) for choice in again.choices] == [ids(choice) for choice in unseeded.choices]


def test_n_answers_in_one_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="fake", messages=CHAT, temperature=0, n=2, stream=True)
    texts, ends = {0: "", 1: ""}, []
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == {0: PARIS, 1: PARIS}
    assert sorted(ends) == [0, 1]


def test_the_whole_of_the_clients_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=CHAT, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == PARIS


def test_many_at_a_time_without_threads(server: Running) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [client.chat.completions.create(model="fake", messages=CHAT, temperature=0) for _ in range(8)]
            texts = [reply.choices[0].message.content for reply in await asyncio.gather(*asked)]
            stream = await client.chat.completions.create(model="fake", messages=CHAT, temperature=0, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [*texts, "".join(pieces)]

    assert asyncio.run(ask()) == [PARIS] * 9


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "edge_llm")
    found: Any = client.models.retrieve("fake")
    assert (found.id, found.meta["n_vocab"]) == ("fake", VOCAB)
    assert isinstance(found.meta["kv_cache_bytes"], int)
    assert found.meta["notice"] == ""
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="x", temperature=0, echo=True)
    assert (reply.object, reply.choices[0].text, reply.choices[0].finish_reason) == (
        "text_completion",
        "x" + PARIS,
        "stop",
    )
    two = client.completions.create(model="fake", prompt=["x", "y"], n=2, temperature=0, max_tokens=2, seed=1)
    assert [(choice.index, choice.text) for choice in two.choices] == [(i, "Pa") for i in range(4)]
    assert two.usage is not None
    assert (two.usage.prompt_tokens, two.usage.completion_tokens) == (2, 8)
    ids = client.completions.create(model="fake", prompt=[[5, 6], [7]], temperature=0, max_tokens=1, echo=True)
    assert ids.choices[1].text.startswith("\x04")
    stream = client.completions.create(model="fake", prompt="x", temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PARIS
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_more_prompts_than_the_queue_holds_are_read_in_turn(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt=["x"] * 30, n=2, temperature=0, max_tokens=1)
    assert [choice.text for choice in reply.choices] == ["P"] * 60


def test_logprobs_of_completions_have_the_older_shape(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="x", temperature=0, logprobs=2, max_tokens=5)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Paris")
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    stream = client.completions.create(model="fake", prompt="x", temperature=0, logprobs=2, max_tokens=5, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    assert [offset for piece in pieces if piece for offset in piece.text_offset or ()] == logprobs.text_offset


def test_a_prompt_that_is_too_long_names_both_numbers(client: openai.OpenAI) -> None:
    """B16: clients match the type, read the numbers, and shorten the conversation."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 1000}], stream=True)
    body: Any = caught.value.body
    assert (body["type"], body["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert (body["n_prompt_tokens"], body["n_ctx"], body["param"]) == (1019, 200, "messages")
    assert "exceeds the available context size" in body["message"]
    slid = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "x" * 1000}],
        max_tokens=2,
        extra_body={"truncation": "auto"},
    )
    assert slid.model_extra["forgotten_tokens"] > 800


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 9}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"verbosity": "high"}, "verbosity"),
        ({"functions": [{"name": "f", "parameters": {}}]}, "functions"),
        ({"extra_body": {"suffix": "x"}}, "suffix"),
        ({"extra_body": {"mirostat": 1}}, "mirostat"),
        ({"extra_body": {"chat_template": "{{ x }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"grammar": "start: 'x'", "regex": "x"}}, "response_format"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=CHAT, **options)
    assert caught.value.param == param


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake",
        messages=CHAT,
        temperature=0,
        user="me",
        store=False,
        metadata={"a": "b"},
        verbosity="medium",
        service_tier="flex",
        prompt_cache_key="k",
        extra_body={"cache_prompt": False, "whatever": 3, "best_of": 1, "stop_token_ids": [], "grammar": ""},
    )
    assert reply.choices[0].message.content == PARIS
    assert reply.service_tier == "flex"
    assert reply.model_extra["timings"]["cache_n"] == 0


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
        {"role": "user"},
        {"role": "tool", "content": "x"},
        {"role": "judge", "content": "x"},
        {"role": "user", "content": "x", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    ],
)  # fmt: skip
def test_messages_that_cannot_be_said_are_refused(client: openai.OpenAI, message: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=[message])
    assert caught.value.type == "invalid_request_error"


def test_parts_of_text_are_lines(client: openai.OpenAI, server: Running) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    many = client.chat.completions.create(
        model="fake", messages=[{"role": "developer", "content": parts}], max_tokens=1
    )
    same = client.chat.completions.create(
        model="fake", messages=[{"role": "system", "content": "one\ntwo"}], max_tokens=1
    )
    assert many.usage is not None
    assert same.usage is not None
    assert same.usage.prompt_tokens == many.usage.prompt_tokens
    assert same.model_extra["timings"]["prompt_n"] == 1


# --- a whole tiny model: grammars ---


@pytest.fixture(scope="module")
def tiny(tiny_folder: Any, kernels: KernelLibrary) -> Iterator[openai.OpenAI]:
    config = EngineConfig(context=512, slots=2, max_chunk=64)
    with (
        running(load=lambda _: ThreadClient(open_engine(tiny_folder, config)), models=("tiny",)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def test_parse_gives_the_callers_own_type(tiny: openai.OpenAI) -> None:
    import pydantic

    class City(pydantic.BaseModel):
        capital: bool
        size: int

    for seed in range(20):
        try:
            reply = tiny.chat.completions.parse(
                model="tiny", messages=CHAT, response_format=City, max_tokens=40, seed=seed, temperature=0.7
            )
        except openai.LengthFinishReasonError:  # a random model may write digits without end; then it is said
            continue
        assert isinstance(reply.choices[0].message.parsed, City)
        return
    pytest.fail("no seed ended within 40 tokens")


def test_other_ways_to_ask_for_a_form(tiny: openai.OpenAI) -> None:
    def answer(**form: Any) -> str:
        extra = {"extra_body": form}
        reply = tiny.chat.completions.create(model="tiny", messages=CHAT, max_tokens=60, seed=4, **extra)
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].message.content or ""

    assert answer(regex="[0-9]{3}").isdigit()
    assert answer(grammar='start: "a" "b"+ "!"').startswith("ab")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(answer(response_format={"type": "json_object", "schema": schema})) in ({"a": 1}, {"a": 2})


def test_labels_come_with_their_probabilities(tiny: openai.OpenAI) -> None:
    labels = ["yes (or so)", "no.", "50% [maybe]\\"]
    for reply in (
        tiny.chat.completions.create(model="tiny", messages=CHAT, extra_body={"choices": labels}),
        tiny.completions.create(model="tiny", prompt="Is it?", extra_body={"choices": labels}),
    ):
        choice: Any = reply.choices[0]
        scored = choice.model_extra["label_probabilities"]
        assert sorted(one["label"] for one in scored) == sorted(labels)
        assert sum(one["probability"] for one in scored) == pytest.approx(1)
        assert (choice.message.content if hasattr(choice, "message") else choice.text) == scored[0]["label"]
    with pytest.raises(openai.BadRequestError):
        tiny.chat.completions.create(model="tiny", messages=CHAT, extra_body={"choices": labels, "regex": "x"})


def test_embeddings(tiny: openai.OpenAI) -> None:
    """The client asks for base64 by itself."""
    texts = ["Paris is a city", "London is a town", "Paris is a city"]
    reply = tiny.embeddings.create(model="tiny", input=texts)
    vectors = [item.embedding for item in reply.data]
    assert [item.index for item in reply.data] == [0, 1, 2]
    assert vectors[0] == vectors[2] != vectors[1]
    assert len(vectors[0]) == 64
    assert math.hypot(*vectors[0]) == pytest.approx(1, abs=1e-5)
    plain = tiny.embeddings.create(model="tiny", input=texts[0], encoding_format="float", dimensions=64)
    assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-7)
    assert reply.usage.prompt_tokens > plain.usage.prompt_tokens == plain.usage.total_tokens
    ids = tiny.embeddings.create(model="tiny", input=[[70, 71], [70]])
    assert len(ids.data) == 2
    many = tiny.embeddings.create(model="tiny", input=[f"text {i}" for i in range(60)])  # more than the queue holds
    assert len(many.data) == 60
    last = tiny.embeddings.create(model="tiny", input=texts[0], extra_body={"pooling": "last"})
    assert last.data[0].embedding != vectors[0]
    for wrong in (
        {"input": ""},
        {"input": []},
        {"input": "x", "dimensions": 8},
        {"input": "x" * 5000},
        {"input": [[]]},
    ):
        with pytest.raises(openai.BadRequestError):
            tiny.embeddings.create(model="tiny", **wrong)


def test_logprobs_of_a_real_model_are_probabilities(tiny: openai.OpenAI) -> None:
    reply = tiny.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=8, logprobs=True, top_logprobs=20, temperature=0
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    for token in logprobs.content or ():
        assert 0 < sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1 + 1e-6
        assert token.top_logprobs[0].logprob == token.logprob


def test_the_sampling_stages_arrive(tiny: openai.OpenAI) -> None:
    """Each option of ours is another answer than without it."""
    base: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 48, "seed": 5, "temperature": 1.5}

    def text(**options: Any) -> str:
        return tiny.chat.completions.create(**base, extra_body=options).choices[0].message.content or ""

    plain = text()
    assert text() == plain
    for options in (
        {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.3}, {"typical_p": 0.2}, {"top_n_sigma": 0.7},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02}, {"mirostat": 2, "mirostat_tau": 1.0},
        {"repeat_penalty": 5.0}, {"repetition_penalty": 5.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
        {"logit_bias": {"70": 100}}, {"seed": 6}, {"seed": -5}, {"temperature": 0},
    ):  # fmt: skip
        assert text(**options) != plain, options
    assert text(temperature=1e-320) == text(temperature=0)
    dry = {"dry_multiplier": 50.0, "dry_base": 2, "dry_allowed_length": 1, "dry_sequence_breakers": ["zz"]}
    repeated = {"top_k": 2, "dry_penalty_last_n": 100}
    assert text(**repeated) != text(**repeated, **dry)
    with pytest.raises(openai.BadRequestError) as caught:
        text(logit_bias={"99999": 1})
    assert caught.value.param == "logit_bias"
