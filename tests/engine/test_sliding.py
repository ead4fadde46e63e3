"""Sliding on real kernels: a conversation past its context, whose every token is the one of a fresh run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.engine import Engine
from edge_llm.engine.handle import Handle
from edge_llm.engine.request import Request
from edge_llm.errors import ContextLengthError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import FinishReason, Message, TokenInfo
from edge_llm.model.manifest import TOKENIZER_NAME
from edge_llm.sampling.params import SamplingParams
from edge_llm.text.tokenizer import Tokenizer
from tests.conftest import export
from tools.tiny_model import write_tiny_gguf

CONTEXT = 128
SINKS = 64
VOCAB = 331


def random_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    """Teacher forcing: a greedy text loops, and hides what is lost."""
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, length).tolist())


def load(folder: Path, **options: object) -> Engine:
    """An engine that reads every prompt itself, or no run would be a fresh one."""
    own = {"context": CONTEXT, "slots": 3, "max_chunk": 64, "prefix_cache": "off"}
    return Engine.load(folder, EngineConfig(**{**own, **options}))


def submit(engine: Engine, ids: tuple[int, ...], tokens: int, policy: str = "slide", **params: object) -> Handle:
    chosen = SamplingParams(**{"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "top_logprobs": 3, **params})
    return engine.submit(Request(token_ids=ids, params=chosen.with_options(logprobs=True), context_policy=policy))


def reports(handle: Handle) -> list[TokenInfo]:
    """Of each token, the best of its row with their log-probabilities: equal only where the rows' logits are."""
    return [info for event in handle for info in getattr(event, "tokens", ())]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path, kernels: KernelLibrary):
    with load(tiny_folder) as made:
        yield made


@pytest.mark.parametrize("start", [5, CONTEXT - 1, 3 * CONTEXT + 7])
def test_an_answer_far_past_the_context_is_that_of_fresh_runs(engine: Engine, start: int) -> None:
    """B18, B20: rows written one by one while the ring wraps equal those of a prompt that is read in chunks."""
    ids = random_ids(start, seed=start)
    handle = submit(engine, ids, 3 * CONTEXT, temperature=1.0, seed=1)
    told = reports(handle)
    ids += handle.finished.token_ids
    assert len(told) == 3 * CONTEXT
    assert handle.finished.forgotten_tokens == start + 3 * CONTEXT - 1 - CONTEXT
    for length in (start, start + 60, start + 123, start + 124, start + 200, start + 256, start + 3 * CONTEXT - 1):
        fresh = reports(submit(engine, ids[:length], 1))
        assert fresh[0].alternatives == told[length - start].alternatives


def test_chunks_threads_and_neighbours_change_nothing(engine: Engine, tiny_folder: Path) -> None:
    """B15: sliding and other requests in one batch, each bit for bit as it is alone."""
    jobs = [(20, "slide"), (100, "error"), (500, "slide"), (127, "error"), (64, "slide"), (129, "slide"), (3, "error")]

    def start(target: Engine, length: int, policy: str) -> Handle:
        return submit(target, random_ids(length, seed=length), 200, policy, temperature=0.8, seed=length)

    alone = []
    for job in jobs:
        handle = start(engine, *job)
        alone.append(reports(handle))
        assert len(alone[-1]) == (200 if job[1] == "slide" else CONTEXT - job[0])
    for options in ({}, {"slots": 7, "max_chunk": 48, "mixed_chunk": 3}, {"slots": 2, "max_chunk": 7, "threads": 1}):
        with load(tiny_folder, **options) as other:
            handles = [start(other, *job) for job in jobs]
            assert [reports(handle) for handle in handles] == alone


def test_a_conversation_that_fits_pays_nothing(engine: Engine) -> None:
    """Up to the last row of the context both policies give the same logits."""
    ids = random_ids(CONTEXT - 40)
    error, slide = (reports(submit(engine, ids, 200, policy, temperature=1.0, seed=2)) for policy in ("error", "slide"))
    assert len(error) == 40
    assert slide[:40] == error
    assert len(slide) == 200


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_prompts_around_the_context(engine: Engine, length: int) -> None:
    """B16: refused with both numbers, or read whole and told; never cut by stealth."""
    handle = submit(engine, random_ids(length), 2)
    handle.text()
    assert handle.finished.usage.prompt_tokens == length
    assert handle.finished.forgotten_tokens == max(0, length + 1 - CONTEXT)
    if length >= CONTEXT:
        with pytest.raises(ContextLengthError, match=rf"{length} tokens.* {CONTEXT} tokens"):
            submit(engine, random_ids(length), 2, "error")
    else:
        other = submit(engine, random_ids(length), 2, "error")
        other.text()
        assert (other.finished.reason, len(other.finished.token_ids)) == (FinishReason.LENGTH, 1)


@pytest.mark.parametrize(("kv_type", "tolerance"), [("f32", 0.01), ("int8", 0.3)])
@pytest.mark.parametrize("length", [CONTEXT + 1, CONTEXT + 100, 8 * CONTEXT])
def test_positions_are_those_of_a_fresh_run_over_what_is_kept(
    one_layer: Path, kernels: KernelLibrary, kv_type: str, tolerance: float, length: int
) -> None:
    """B20: the first layer's keys and values know nothing of other tokens, so a model of one layer must say after a shift
    what it says of the sinks and the window alone, moved together; only rotary's rounding differs."""
    ids = random_ids(length, seed=length)
    kept = ids[:SINKS] + ids[length - (CONTEXT - SINKS) :]
    with load(one_layer, kv_type=kv_type) as engine:
        slid, fresh, other = (
            {
                entry.token_id: entry.logprob
                for entry in reports(submit(engine, asked, 1, top_logprobs=20))[0].alternatives
            }
            for asked in (ids, kept, ids[length - CONTEXT :])
        )
    common = slid.keys() & fresh.keys()
    assert len(common) >= 17
    assert max(abs(slid[token] - fresh[token]) for token in common) < tolerance
    common = slid.keys() & other.keys()
    assert len(common) < 17 or max(abs(slid[token] - other[token]) for token in common) > tolerance


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-layer")
    return export(write_tiny_gguf(folder / "tiny.gguf", layers=1), folder / "exported")


def test_a_chat_goes_on_and_names_what_it_forgot(engine: Engine, tiny_folder: Path) -> None:
    """In its slot it reads nothing twice, however much has fallen out, and says what it says when all is read anew."""
    messages = [Message.user("hello " * 8)]
    forgotten: list[tuple[int, ...]] = []
    no_text = dict.fromkeys([*range(3), *range(3 + 0x80, 3 + 0x100)], -100.0)  # control, and bytes above ASCII
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True, logit_bias=no_text)
    with load(tiny_folder, prefix_cache="memory", context_policy="slide") as keeping:
        for turn in range(8):
            handle, anew = keeping.chat(messages, params), engine.chat(messages, params, context_policy="slide")
            text = handle.text()
            assert text == anew.text()
            assert handle.finished.token_ids == anew.finished.token_ids
            assert handle.finished.forgotten == anew.finished.forgotten
            usage = handle.finished.usage
            assert usage.cached_tokens > usage.prompt_tokens - 50 or turn == 0
            assert anew.finished.usage.cached_tokens == 0
            forgotten.append(handle.finished.forgotten)
            messages += [keeping.reply(text, handle.finished), Message.user(f"question {turn}")]
    assert forgotten[0] == ()
    assert all(set(before) <= set(after) for before, after in pairwise(forgotten))
    assert 0 not in forgotten[-1]
    assert len(forgotten[-1]) > 5


@pytest.mark.real_model
def test_the_real_model_slides(smollm2_folder: Path, kernels: KernelLibrary) -> None:
    """As above, with text that means something: an answer through three windows beside others, and fresh runs of it."""
    text = (Path(__file__).parents[2] / "tools/eval/english.txt").read_text(encoding="utf-8")
    ids = tuple(Tokenizer.from_file(smollm2_folder / TOKENIZER_NAME).encode_raw(text[:700]))
    with load(smollm2_folder, max_chunk=128) as engine:
        short = engine.chat(
            [Message.user("What is the capital of France?")], SamplingParams(max_tokens=8, temperature=0)
        )
        long = engine.complete(text[:2000], SamplingParams(max_tokens=4, temperature=0), context_policy="slide")
        handle = submit(engine, ids, 3 * (CONTEXT - SINKS), temperature=1.0, seed=3)
        told = reports(handle)
        assert short.text().strip()
        assert short.finished.forgotten_tokens == 0
        assert long.text().strip()
        assert long.finished.forgotten_tokens > 250
        ids += handle.finished.token_ids
        for length in (len(ids) - 1, len(ids) - 77):
            fresh = reports(submit(engine, ids[:length], 1))
            assert fresh[0].alternatives == told[length - len(ids)].alternatives
