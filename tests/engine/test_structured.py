"""Constrained requests in the engine: whole answers are valid, others in the batch are not disturbed, faults come first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.engine import Engine
from edge_llm.errors import ParameterError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished, FinishReason, TextDelta
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams

ROW = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "two", "three"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tiny_folder: Path, kernels: KernelLibrary) -> Iterator[Engine]:
    """A tiny model with random weights: only the grammar makes sense of it."""
    with Engine.load(tiny_folder, EngineConfig(context=256, slots=4)) as opened:
        yield opened


def hot(seed: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=120).with_options(**options)


def test_a_random_model_writes_valid_json(engine: Engine) -> None:
    for seed in range(10):
        handle = engine.complete("A row:", hot(seed), response_format=Grammar.json_schema(ROW))
        row = json.loads(handle.text())
        assert row["name"] in ("one", "two", "three")
        assert row["n"] in range(10)
        assert handle.finished is not None
        assert handle.finished.reason is FinishReason.STOP


def test_one_row_of_a_batch_may_end_early(engine: Engine) -> None:
    """B54: and a free answer is the same beside constrained ones as alone."""
    free = hot(7, ignore_eos=True, max_tokens=60)
    alone = engine.complete("Tell me", free).text()
    short = engine.complete("A word:", hot(1), response_format=Grammar.regex("a"))
    long = engine.complete("Digits:", hot(2), response_format=Grammar.regex("[0-9]{40}"))
    beside = engine.complete("Tell me", free)
    assert short.text() == "a"
    assert re.fullmatch("[0-9]{40}", long.text())
    assert beside.text() == alone


def test_the_same_seed_gives_the_same_structure(engine: Engine) -> None:
    grammar = Grammar.json_schema(ROW)
    first, second = (engine.complete("A row:", hot(5), response_format=grammar).text() for _ in range(2))
    assert first == second


def test_truncation_is_reported_as_length(engine: Engine) -> None:
    handle = engine.complete("A row:", hot(5, max_tokens=4), response_format=Grammar.json_schema(ROW))
    events = list(handle)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH
    assert events[-1].usage.completion_tokens == 4
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) in (
        '{"name',
        '{"name"',
        '{"nam',
        '{"na',
    )


def test_faults_come_before_generation_and_the_next_request_works(engine: Engine) -> None:
    with pytest.raises(ParameterError, match="uniqueItems"):
        engine.complete("x", response_format=Grammar.json_schema({"type": "array", "uniqueItems": True}))
    with pytest.raises(ParameterError, match="Grammar"):
        engine.complete("x", response_format={"type": "object"})  # type: ignore[arg-type]
    assert engine.complete("x", hot(1), response_format=Grammar.regex("b")).text() == "b"


def test_stop_strings_and_penalties_hold_inside_a_grammar(engine: Engine) -> None:
    params = hot(3, stop=("3",), frequency_penalty=1.0)
    handle = engine.complete("Digits:", params, response_format=Grammar.regex("[1-3]{100}"))
    text = handle.text()
    assert re.fullmatch("[12]*", text)
    assert handle.finished is not None
    assert handle.finished.matched_stop == "3"
