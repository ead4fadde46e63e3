"""What several callers, processes and conversations share: threads, forks, memory, and the ends of a context."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.engine import Engine
from edge_llm.engine.request import Request
from edge_llm.errors import ContextLengthError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import FinishReason
from edge_llm.model.manifest import ModelManifest
from edge_llm.sampling.params import SamplingParams

ROOT = Path(__file__).parents[2]
PROMPTS = ["Paris is the capital of France. " * 3, "A question", "hello world " * 20, "Two are three"]


def script(text: str, *arguments: str) -> list[str]:
    """Lines that a script run in a process of its own has printed."""
    result = subprocess.run(
        [sys.executable, "-c", text, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_engines_on_threads_of_their_own(tiny_folder: Path, kernels: KernelLibrary) -> None:
    """B32: two engines step at the same time, over the same compiled kernels and mapped weights."""
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=4, ignore_eos=True)

    def answers(engine: Engine) -> list[tuple[int, ...]]:
        handles = [engine.complete(prompt, params) for prompt in PROMPTS]
        for handle in handles:
            handle.text()
        return [handle.finished.token_ids for handle in handles]

    config = EngineConfig(context=256, slots=2)
    with Engine.load(tiny_folder, config) as one, Engine.load(tiny_folder, config) as two:
        expected = answers(one)
        found: list[list[tuple[int, ...]]] = []
        threads = [
            threading.Thread(target=lambda engine=engine: found.append(answers(engine)))
            for engine in (one, two, one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [expected] * 4


FORK = """
import os, signal, sys
from pathlib import Path
import numpy as np
from edge_llm import Engine, EngineConfig, SamplingParams
from edge_llm.errors import EngineStoppedError
from edge_llm.kernels.warmup import load_kernels
from edge_llm.sampling.sampler import Sampler

folder, config = Path(sys.argv[1]), EngineConfig(context=512, slots=2)
params = SamplingParams(max_tokens=30, temperature=0.8, seed=7, ignore_eos=True)
long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
logits = np.random.default_rng(0).normal(size=331).astype(np.float32)

def drawn():
    return Sampler(load_kernels(), 331).sequence(params).sample(logits, 3).token_id

engine = Engine.open(folder, config)
expected, token = engine.complete("hello world", params).text(), drawn()
running = engine.complete("hello", long)
next(running)
child = os.fork()  # in the middle of an answer: the child has the memory, but neither engine thread nor pool
if child == 0:
    signal.alarm(60)
    code = 1
    try:
        try:
            engine.complete("hello world", params)
        except EngineStoppedError:
            engine.close()
            with Engine.open(folder, config) as own:
                if own.complete("hello world", params).text() == expected and drawn() == token:
                    code = 0
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
running.text()
print(running.finished.usage.completion_tokens)
print(engine.complete("hello world", params).text() == expected)
engine.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_is_refused_but_may_load_its_own(tiny_folder: Path, kernels: KernelLibrary) -> None:
    """B32: what is right after a fork: the engine of the parent says that it is not there, one of the child's own and
    the sampler work, and the parent goes on."""
    assert script(FORK, str(tiny_folder)) == ["0", "400", "True"]


MEMORY = """
import random, sys
from pathlib import Path
from edge_llm import Engine, EngineConfig, SamplingParams

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

random.seed(1)
with Engine.open(Path(sys.argv[1]), EngineConfig(context=512, slots=3)) as engine:
    def ask(count):
        while count > 0:
            handles = []
            for _ in range(min(count, random.randint(1, 6))):
                params = SamplingParams(
                    max_tokens=random.randint(1, 30), seed=random.randrange(99), stop=random.choice([(), ("e", "the ")]),
                    repetition_penalty=random.choice([1.0, 1.1]), top_logprobs=random.choice([0, 0, 3]),
                )
                handles.append(engine.complete("word " * random.choice([1, 5, 40, 90]), params))
            count -= len(handles)
            for handle in handles:
                if random.random() < 0.1:
                    handle.cancel()
                handle.text()
    ask(100)  # every shape of a step has been met
    before = resident()
    ask(300)
    print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_is_flat_over_many_requests(tiny_folder: Path, kernels: KernelLibrary) -> None:
    """B38: 300 requests of mixed length, some cancelled. One row of logits kept a request would be 0.4 MB."""
    (grown,) = script(MEMORY, str(tiny_folder))
    assert int(grown) < 4 << 20


@pytest.mark.parametrize("context", [64, 100, 128])
def test_a_context_is_as_long_for_a_prompt_as_for_an_answer(
    tiny_folder: Path, kernels: KernelLibrary, context: int
) -> None:
    """B16, B18 on real kernels: filled by prompt or by generation, at and beside whole tiles, to the last row."""
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    with Engine.load(tiny_folder, EngineConfig(context=context, slots=1)) as engine:

        def answer(ids: list[int]) -> list[int]:
            handle = engine.submit(Request(token_ids=tuple(ids), params=greedy))
            handle.text()
            assert handle.finished.reason is FinishReason.LENGTH
            return list(handle.finished.token_ids)

        whole = [5, *answer([5])]
        assert len(whole) == context
        for length in (63, 64, 65, context - 1):
            if length < context:
                assert whole[:length] + answer(whole[:length]) == whole
        for length in (context, context + 1, 10 * context):
            with pytest.raises(ContextLengthError, match=rf"{length}\b.*\b{context}\b"):
                engine.submit(Request(token_ids=(5,) * length, params=greedy))


def test_a_constrained_row_that_ends_early_leaves_the_others_alone(tiny_folder: Path, kernels: KernelLibrary) -> None:
    """B54, B14: one row may only end, one has nothing left to say; the others say what they say alone."""
    with Engine.load(tiny_folder, EngineConfig(context=256, slots=4)) as engine:
        (end, *_) = ModelManifest.read(tiny_folder).tokens.eos
        free = SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
        only_end = SamplingParams(max_tokens=30, logit_bias={i: -100.0 for i in range(331) if i != end})
        alone = []
        for prompt in PROMPTS[:2]:
            handle = engine.complete(prompt, free)
            handle.text()
            alone.append(handle.finished.token_ids)
        handles = [engine.complete(PROMPTS[0], free), engine.complete(PROMPTS[2], only_end)]
        handles += [engine.complete(PROMPTS[1], free), engine.complete(PROMPTS[3], only_end)]
        texts = [handle.text() for handle in handles]
        assert [handles[i].finished.token_ids for i in (0, 2)] == alone
        assert [(texts[i], handles[i].finished.reason) for i in (1, 3)] == [("", FinishReason.STOP)] * 2
