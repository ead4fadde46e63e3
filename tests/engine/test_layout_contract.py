"""What an engine does, in every layout and on every provider that is there: the same tests over each."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.engine import Engine
from edge_llm.engine.request import Request
from edge_llm.errors import ContextLengthError, IntegrityError
from edge_llm.export.reference_graph import write_reference
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished, FinishReason, Message, TextDelta, Tool
from edge_llm.model.manifest import GRAPH_NAME, TOKENIZER_NAME, WEIGHTS_NAME
from edge_llm.model.plugins import PLUGINS
from edge_llm.model.stock_session import StockSession
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from tests.model.static_rig import emulated_hexagon

CONFIG = EngineConfig(context=512, slots=6, max_chunk=64, mixed_chunk=16)
LAYOUTS = {
    "ring": CONFIG,
    "ring, f32": CONFIG.with_options(kv_type="f32"),
    "static": CONFIG.with_options(layout="static"),
    "openvino": CONFIG.with_options(provider="openvino"),
    "emulated NPU": CONFIG.with_options(provider="qnn"),
}
PROMPTS = ["Paris is the capital of France. " * (1 + i) for i in range(4)]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)
EVERYTHING = SamplingParams(
    max_tokens=16,
    seed=5,
    dry_multiplier=0.8,
    top_n_sigma=2.0,
    typical_p=0.9,
    xtc_probability=0.5,
    repetition_penalty=1.1,
)
WEATHER = Tool("weather", "The sky.", '{"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}}')


@pytest.fixture(scope="module", params=LAYOUTS)
def config(request: pytest.FixtureRequest) -> Iterator[EngineConfig]:
    config = LAYOUTS[request.param]
    plugin = PLUGINS.get(config.provider)
    if plugin is not None and find_spec(plugin.package) is None:
        pytest.skip(f"{plugin.distribution} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        if config.provider == "qnn":
            if not os.environ.get("EDGE_LLM_TEST_NPU"):
                pytest.skip("an emulated NPU takes many minutes: EDGE_LLM_TEST_NPU=1")
            patch.setitem(PLUGINS, "qnn", emulated_hexagon())
        yield config


@pytest.fixture(scope="module")
def engine(tiny_folder: Path, kernels: KernelLibrary, config: EngineConfig) -> Iterator[Engine]:
    with Engine.open(tiny_folder, config) as made:
        assert (made.info.layout == "ring") == (config.layout == "auto" and config.provider == "auto")
        assert made.info.notice == ""
        yield made


@pytest.fixture(scope="module")
def reference(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> StockSession:
    return StockSession(write_reference(tiny_folder, tmp_path_factory.mktemp("reference"), window=512), threads=1)


def answer(engine: Engine, request: Request) -> Finished:
    handle = engine.submit(request)
    handle.text()
    assert handle.finished is not None
    return handle.finished


def ids(engine: Engine, prompt: str, params: SamplingParams, **options: object) -> tuple[int, ...]:
    return answer(engine, Request.completion(prompt, params, **options)).token_ids


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, EVERYTHING], ids=["greedy", "sampled", "everything"])
def test_answers_are_the_same_alone_and_together(engine: Engine, params: SamplingParams) -> None:
    """Continuous batching; the second time their prompts are in memory."""
    handles = [engine.complete(prompt, params) for prompt in PROMPTS * 2]
    for handle in handles:
        handle.text()
    together = [handle.finished.token_ids for handle in handles if handle.finished]
    assert together == [ids(engine, prompt, params) for prompt in PROMPTS] * 2


def test_rows_in_memory_are_found(engine: Engine) -> None:
    prompt = "The rows of this prompt are read once. " * 4
    first, second = (answer(engine, Request.completion(prompt, SAMPLED)) for _ in range(2))
    assert second.usage.cached_tokens > first.usage.cached_tokens
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - 1
    assert second.token_ids == first.token_ids


def test_a_chat_goes_on_from_its_own_rows(engine: Engine) -> None:
    messages = [Message.user("What is the capital of France?")]
    handle = engine.chat(messages, GREEDY)
    reply = engine.reply(handle.text(), handle.finished)
    again = answer(engine, Request.chat([*messages, reply, Message.user("And of Italy?")], GREEDY))
    assert again.usage.cached_tokens >= handle.finished.usage.prompt_tokens


def test_rows_on_disk_are_found_by_the_next_engine(
    tiny_folder: Path, engine: Engine, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, cached = "What a day it was, and what a night came after it! " * 3, []
    expected = ids(engine, prompt, SAMPLED, cache=False)
    monkeypatch.setattr("edge_llm.engine.assembly.prefix_folder", lambda: tmp_path)
    for _ in range(2):
        with Engine.open(tiny_folder, config.with_options(prefix_cache="disk")) as storing:
            found = answer(storing, Request.completion(prompt, SAMPLED))
        assert found.token_ids == expected
        cached.append(found.usage.cached_tokens)
    assert cached[0] == 0
    assert cached[1] > 60


@pytest.mark.parametrize("name", [GRAPH_NAME, WEIGHTS_NAME, TOKENIZER_NAME])
def test_a_damaged_copy_leaves_nothing_for_the_sound_model(
    tiny_folder: Path, engine: Engine, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A byte in it is another, and its manifest does not say so: rows on disk and the static form are the sound one's."""
    copy, prefixes = tmp_path / "copy", tmp_path / "prefixes"
    prefixes.mkdir(mode=0o700)
    shutil.copytree(tiny_folder, copy)
    sound = (copy / name).read_bytes()
    (copy / name).write_bytes(sound[:-2] + bytes([sound[-2] ^ 1]) + sound[-1:])
    monkeypatch.setattr("edge_llm.engine.assembly.prefix_folder", lambda: prefixes)
    storing = config.with_options(prefix_cache="disk")
    with pytest.raises(IntegrityError, match=f"{name}: wrong sha256"):
        Engine.open(copy, storing)
    assert not list(prefixes.iterdir())
    (copy / name).write_bytes(sound)
    with Engine.open(copy, storing) as repaired:
        assert ids(repaired, PROMPTS[3], SAMPLED) == ids(engine, PROMPTS[3], SAMPLED, cache=False)


def test_drafts_change_no_token(tiny_folder: Path, config: EngineConfig, engine: Engine) -> None:
    params = GREEDY.with_options(max_tokens=60)
    drafted = answer(engine, Request.completion(PROMPTS[3], params))
    assert drafted.usage.draft_tokens > 0
    with Engine.open(tiny_folder, config.with_options(speculation="off")) as plain:
        assert ids(plain, PROMPTS[3], params) == drafted.token_ids


def test_a_schema_is_kept(engine: Engine) -> None:
    properties = {"sky": {"enum": ["blue", "grey"]}, "degrees": {"type": "integer", "minimum": 0, "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": ["sky", "degrees"]}
    form = Grammar.json_schema({**schema, "additionalProperties": False})
    for seed in range(3):
        params = SamplingParams(max_tokens=200, seed=seed, temperature=0.7)
        value = json.loads(engine.chat([Message.user("?")], params, response_format=form).text())
        assert value["sky"] in ("blue", "grey")
        assert 0 <= value["degrees"] <= 99


def test_a_tool_is_called(engine: Engine) -> None:
    params = SamplingParams(max_tokens=100, seed=1)
    request = Request.chat([Message.user("The sky?")], params, tools=(WEATHER,), tool_choice="weather")
    (call,) = answer(engine, dataclasses.replace(request, parallel_tool_calls=False)).tool_calls
    assert call.name == "weather"
    assert json.loads(call.arguments).get("sky") in ("blue", "grey", None)


def test_beams_are_the_most_probable_answers(engine: Engine, reference: StockSession) -> None:
    request = Request.completion(PROMPTS[1], SamplingParams(max_tokens=5, ignore_eos=True), beams=3, n_best=3)
    beams = answer(engine, request).beams
    assert len({beam.token_ids for beam in beams}) == 3
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
    prompt = engine.tokenize(Request.completion(PROMPTS[1]))
    for beam in beams:
        rows = reference.logits(np.array([*prompt, *beam.token_ids]))[len(prompt) - 1 : -1]
        assert beam.logprob == pytest.approx(_log_probability(rows, beam.token_ids), abs=0.3)


def test_an_embedding_is_the_references(engine: Engine, reference: StockSession) -> None:
    request = Request.completion(PROMPTS[3], embedding="mean")
    vector = np.array(answer(engine, request).embedding)
    rows = reference.hidden_states(np.array(engine.tokenize(request))).astype(np.float64)
    assert float(vector @ rows.mean(axis=0)) / float(np.linalg.norm(rows.mean(axis=0))) > 0.999
    assert answer(engine, request).embedding == tuple(vector)


def test_labels_are_scored_as_the_reference_does(engine: Engine, reference: StockSession) -> None:
    labels = ("a cat", "a dog", "nothing at all")
    prompt = engine.tokenize(Request.completion(PROMPTS[2]))
    for choice in answer(engine, Request.completion(PROMPTS[2], choices=labels)).choices:
        own = engine.tokenize(Request.completion(choice.label))
        rows = reference.logits(np.array([*prompt, *own]))[len(prompt) - 1 : -1]
        assert choice.logprob == pytest.approx(_log_probability(rows, own), abs=0.1 * len(own))


def test_log_probabilities_come_with_the_text(engine: Engine, reference: StockSession) -> None:
    params = GREEDY.with_options(max_tokens=4, logprobs=True, top_logprobs=3)
    handle = engine.complete(PROMPTS[0], params)
    told = [info for event in handle if isinstance(event, TextDelta) for info in event.tokens]
    prompt, own = engine.tokenize(Request.completion(PROMPTS[0])), handle.finished.token_ids
    rows = reference.logits(np.array([*prompt, *own]))[len(prompt) - 1 : -1]
    assert sum(info.chosen.logprob for info in told) == pytest.approx(_log_probability(rows, own), abs=0.3)


def test_a_conversation_slides_or_ends_with_its_context(engine: Engine) -> None:
    long = SAMPLED.with_options(max_tokens=540)
    slid = answer(engine, Request.completion(PROMPTS[0], long, context_policy="slide"))
    assert len(slid.token_ids) == 540
    assert slid.forgotten_tokens > 0
    ended = answer(engine, Request.completion(PROMPTS[0], long))
    assert ended.reason is FinishReason.LENGTH
    assert len(ended.token_ids) < 512
    with pytest.raises(ContextLengthError):
        answer(engine, Request(token_ids=(5,) * 600))


def test_stops_deadlines_and_cancels_give_their_slots_back(engine: Engine) -> None:
    whole = engine.complete(PROMPTS[0], SAMPLED).text()
    assert (
        engine.complete(PROMPTS[0], SAMPLED.with_options(stop=(whole[3:5],))).text() == whole[: whole.index(whole[3:5])]
    )
    late = answer(engine, Request.completion(PROMPTS[0], SAMPLED.with_options(max_tokens=200), timeout_s=0.001))
    assert late.reason is FinishReason.TIMEOUT
    cancelled = engine.complete(PROMPTS[0], SAMPLED.with_options(max_tokens=200))
    cancelled.cancel()
    cancelled.text()
    assert engine.complete(PROMPTS[0], SAMPLED).text() == whole
    assert engine.statistics().num_requests_running == 0


def _log_probability(rows: np.ndarray, token_ids: tuple[int, ...] | list[int]) -> float:
    """Of these tokens, each by the logits of its row."""
    rows = rows.astype(np.float64)
    logs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    return float(logs[np.arange(len(token_ids)), list(token_ids)].sum())
