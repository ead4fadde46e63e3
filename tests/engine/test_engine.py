"""Engine: the facade for Python programs; over fakes, then over a whole tiny model."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine import engine as facade
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.client import ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.engine.engine import Engine
from edge_llm.engine.request import Request
from edge_llm.errors import EngineStoppedError, ModelNotFoundError, ParameterError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished, Message
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import PARIS, make_core, says

CHAT = [Message.user("What is the capital of France?")]


def test_a_loaded_engine_chats_and_completes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []

    def fake_open(folder: Path, config: EngineConfig, progress: object) -> EngineCore:
        calls.append((folder, config, progress))
        return make_core(says(PARIS), context=99)

    monkeypatch.setattr(facade, "open_engine", fake_open)
    monkeypatch.setattr("edge_llm.install.importer.resolve", lambda model, *progress: calls.append(model) or tmp_path)
    config = EngineConfig(slots=1)
    with Engine.load("some-model", config) as engine:
        assert engine.chat(CHAT, SamplingParams(temperature=0)).text() == PARIS
        assert engine.submit(Request.chat(CHAT)).text() == PARIS
        last = list(engine.complete("x", SamplingParams(max_tokens=1, seed=5)))[-1]
        assert isinstance(last, Finished)
        assert last.seed == 5
        assert (engine.info.context, engine.info.name) == (99, "fake")
    assert calls == ["some-model", (tmp_path, config, None)]
    with pytest.raises(EngineStoppedError):
        engine.chat(CHAT)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        Engine.load("no-such-model")


# --- the real parts together: a tiny random model --------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_folder: Path, kernels: KernelLibrary):
    with Engine.load(tiny_folder, EngineConfig(context=512, slots=4, max_chunk=64, mixed_chunk=16)) as made:
        yield made


PROMPTS = [
    "Paris is the capital of France. " * (1 + 2 * i) if i % 2 else f"A question about {i} things" for i in range(6)
]


def answers(engine: Engine, params: SamplingParams) -> list[tuple[int, ...]]:
    """Ids of the answers to PROMPTS, asked all at once."""
    handles = [engine.complete(prompt, params) for prompt in PROMPTS]
    texts = [handle.text() for handle in handles]
    assert all(isinstance(text, str) for text in texts)
    return [handle.finished.token_ids for handle in handles]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, temperature=0),
        SamplingParams(max_tokens=24, seed=3),
        SamplingParams(max_tokens=24, seed=3, dry_multiplier=0.8, top_n_sigma=2.0, typical_p=0.9, xtc_probability=0.5),
        SamplingParams(max_tokens=24, seed=3, dry_multiplier=0.8, mirostat_tau=4.0),
    ],
)
def test_answers_are_the_same_alone_and_together(engine: Engine, params: SamplingParams) -> None:
    """B15, with real kernels: chunks, rows and neighbours change no token."""
    together = answers(engine, params)
    alone = []
    for prompt in PROMPTS:
        handle = engine.complete(prompt, params)
        handle.text()
        alone.append(handle.finished.token_ids)
    assert together == alone
    assert len(set(together)) > 1


def test_other_chunks_and_slots_change_no_token(engine: Engine, tiny_folder: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=11)
    with Engine.load(tiny_folder, EngineConfig(context=512, slots=1, max_chunk=7, mixed_chunk=1, threads=1)) as other:
        assert answers(other, params) == answers(engine, params)


def test_a_slot_that_is_used_again_remembers_nothing(tiny_folder: Path, kernels: KernelLibrary) -> None:
    params = SamplingParams(max_tokens=10, temperature=0)
    with Engine.load(tiny_folder, EngineConfig(context=128, slots=1)) as engine:
        first = engine.chat(CHAT, params).text()
        engine.complete("something else " * 6, params).text()
        assert engine.chat(CHAT, params).text() == first


@pytest.mark.parametrize("kv_type", ["int8", "f32"])
def test_what_a_failed_request_left_behind_never_reaches_the_next(
    tiny_folder: Path, kernels: KernelLibrary, kv_type: str
) -> None:
    """B14: rows of NaN were written to a slot, which is then given to somebody else."""

    def answer(poison: bool) -> list[int]:
        core = open_engine(tiny_folder, EngineConfig(context=256, slots=1, max_chunk=64, kv_type=kv_type))
        if poison:
            slot = core.cache.acquire()
            for layer in core.cache.layers:
                for array in layer.arrays.values():
                    array[slot] = np.nan if array.dtype == np.float32 else 127
            core.cache.release(slot)
        events: list[object] = []
        params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        core.enqueue(core.prepare(Request.completion(PROMPTS[1], params), events.append))
        while core.has_work:
            core.step()
        core.close()
        assert isinstance(events[-1], Finished), events[-1]
        return list(events[-1].token_ids)

    assert answer(poison=True) == answer(poison=False)


def test_logprobs_come_with_the_text(engine: Engine) -> None:
    handle = engine.chat(CHAT, SamplingParams(max_tokens=8, temperature=0, logprobs=True, top_logprobs=2))
    infos = [info for event in handle for info in getattr(event, "tokens", ())]
    assert [info.chosen.token_id for info in infos] == list(handle.finished.token_ids)
    assert all(info.chosen == info.alternatives[0] and info.chosen.logprob <= 0 for info in infos)


def test_a_config_that_the_model_cannot_follow_is_refused(tiny_folder: Path, kernels: KernelLibrary) -> None:
    with pytest.raises(ParameterError, match="trained"):
        open_engine(tiny_folder, EngineConfig(context=100_000))


def test_parts_are_freed_together(tiny_folder: Path, kernels: KernelLibrary) -> None:
    core = open_engine(tiny_folder, EngineConfig(context=64, kv_type="f32"))
    client = ThreadClient(core)
    assert client.submit(Request.completion("hello", SamplingParams(max_tokens=2))).text() is not None
    client.close()
    gc.collect()
    with pytest.raises(EngineStoppedError):
        client.submit(Request.completion("hello"))
