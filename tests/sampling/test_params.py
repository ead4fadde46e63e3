"""SamplingParams refuse what cannot be meant, and complete themselves from a model's recommendations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import MAX_DRY_WINDOW
from edge_llm.sampling.params import (
    MAX_DRY_BREAKERS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)

RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, 2**31 - 1, None], [0, -1, 2**31, 1.0, True, "1"]),
    ("temperature", [0, 0.0, -0.0, 5, 1e-300, None], [-1e-9, 5.0001, 2**63, "1", True]),
    ("top_k", [0, 1, 2**31 - 1, None], [-1, 2**31, 1.0, True]),
    ("top_p", [0.0, 1.0, 1, None], [-0.1, 1.0001, "0.5", False]),
    ("min_p", [0.0, 1.0, None], [-0.1, 1.0001, []]),
    ("repetition_penalty", [0.01, 1, 10.0, None], [0.0, -1.0, 10.1]),
    ("presence_penalty", [-2.0, 0, 2.0], [-2.1, 2.1, None]),
    ("frequency_penalty", [-2.0, 0, 2.0], [-2.1, 2.1, None]),
    ("dry_multiplier", [0.0, 100], [-0.1, 100.1, None, True]),
    ("dry_base", [1.0, 10], [0.99, 10.1, "2"]),
    ("dry_allowed_length", [1, MAX_DRY_WINDOW], [0, -1, MAX_DRY_WINDOW + 1, 2.0, None]),
    ("dry_penalty_last_n", [1, MAX_DRY_WINDOW], [0, -1, MAX_DRY_WINDOW + 1, 2.0, None]),
    (
        "dry_sequence_breakers",
        [(), ("a",), ("é" * 32,), ("\ud800",), ("a",) * MAX_DRY_BREAKERS],
        [[], "a", ("",), (1,), ("a" * 65,), ("a",) * (MAX_DRY_BREAKERS + 1)],
    ),
    ("top_n_sigma", [0.0, 100], [-0.1, 100.1]),
    ("typical_p", [0.0, 1, 1.0], [-0.1, 1.1, None]),
    ("xtc_probability", [0.0, 1, 1.0], [-0.1, 1.1, True]),
    ("xtc_threshold", [0.0, 1, 1.0], [-0.1, 1.1]),
    ("mirostat_tau", [0.0, 20], [-0.1, 20.1]),
    ("mirostat_eta", [0.0, 1], [-0.1, 1.1]),
    ("seed", [0, MAX_SEED, None], [-1, MAX_SEED + 1, 1.0, True]),
    ("top_logprobs", [0, MAX_TOP_LOGPROBS], [-1, MAX_TOP_LOGPROBS + 1, None, True]),
    ("stop", [(), ("a",), ("é" * 128,), ("\ud800",)], [[], ("",), ("a" * 257,), ("a",) * (MAX_STOPS + 1), (1,), "a"]),
    ("logit_bias", [{}, {0: -100}, {2**31 - 1: 1e4}], [{-1: 0.0}, {2**31: 0.0}, {0: 1e5}, {"0": 1.0}, {True: 1.0}]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, good, _ in RANGES for value in good])
def test_a_value_in_range_is_kept(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, bad in RANGES for value in bad])
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=name.split("_", maxsplit=1)[0]):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "dry_multiplier",
        "dry_base",
        "top_n_sigma",
        "typical_p",
        "xtc_probability",
        "xtc_threshold",
        "mirostat_tau",
        "mirostat_eta",
    ],
)
def test_only_finite_numbers_are_taken(name: str, value: float) -> None:
    with pytest.raises(ParameterError, match="finite"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="finite"):
        SamplingParams(logit_bias={0: value})


def test_too_many_biases_are_refused() -> None:
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)).logit_bias) == MAX_LOGIT_BIAS
    with pytest.raises(ParameterError, match="at most 1024"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))


def test_a_changed_copy_is_validated() -> None:
    params = SamplingParams(top_k=3)
    assert params.with_options(top_p=0.5) == SamplingParams(top_k=3, top_p=0.5)
    with pytest.raises(ParameterError):
        params.with_options(top_p=2.0)


def test_defaults_fill_only_what_is_unset() -> None:
    params = SamplingParams(temperature=0.0).with_defaults({"temperature": 0.7, "top_k": 40.0})
    assert (params.temperature, params.top_k) == (0.0, 40)
    assert isinstance(params.top_k, int)
    assert (params.top_p, params.min_p, params.repetition_penalty) == (1.0, 0.0, 1.0)
    assert params.with_defaults({"top_p": 0.1}) == params
