"""Typical, top-n-sigma, XTC, mirostat and DRY against llama.cpp's own (tools/make_sampler_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_llm.kernels.penalties import penalise_repeats
from edge_llm.sampling.dry import DryWindow
from edge_llm.sampling.params import SamplingParams
from tests.reference import sampling as truth
from tests.sampling.test_sampler import drawn

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "llama_samplers.json").read_text())
VOCAB = 49_152


@pytest.mark.parametrize("number", range(len(GOLDEN["truncations"])))
def test_the_same_tokens_stay(number: int) -> None:
    row = GOLDEN["truncations"][number]
    logits = np.array(row["row"], np.float32) / np.float32(GOLDEN["unit"])
    for case in row["cases"]:
        params = SamplingParams(**case["params"], seed=1).with_defaults({})
        mu = 2 * params.mirostat_tau if params.mirostat_tau else None
        mass, _ = truth.kept(logits, params, mu=mu, xtc=params.xtc_probability == 1)
        assert sorted(mass) == case["kept"]
        assert drawn(logits, 20, **case["params"]) <= set(case["kept"])


def penalties(case: dict[str, Any]) -> dict[int, float]:
    """What our kernel takes from which token."""
    params = SamplingParams(**case["params"])
    texts = {int(token): text.encode() for token, text in GOLDEN["texts"].items()}
    breakers = [text.encode() for text in case["breakers"]]
    window = DryWindow(params.dry_penalty_last_n, breakers, texts.__getitem__, GOLDEN["ids"][: case["tokens"]])
    values, longest = np.zeros(VOCAB, np.float32), np.zeros(VOCAB, np.int32)
    assert penalise_repeats(
        values,
        *window.rows,
        window.limit,
        params.dry_allowed_length,
        params.dry_multiplier,
        params.dry_base,
        longest,
    )
    return {int(token): -float(values[token]) for token in values.nonzero()[0]}


@pytest.mark.parametrize("number", range(0, len(GOLDEN["dry"]), 10))
def test_dry_takes_as_much_from_the_same_tokens(number: int) -> None:
    for case in GOLDEN["dry"][number : number + 10]:
        expected = {int(token): penalty for token, penalty in case["penalties"].items()}
        assert penalties(case) == pytest.approx(expected, rel=1e-6)
