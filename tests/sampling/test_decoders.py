"""SampledDecoder: one token a step, each with the counter of its own index."""

from __future__ import annotations

import numpy as np
import pytest

from edge_llm.errors import GenerationError
from edge_llm.sampling.decoders import SampledDecoder, Selection
from edge_llm.sampling.sampler import Sampled


class Recorder:
    seed = 42

    def __init__(self) -> None:
        self.calls: list[object] = []

    def sample(self, logits_row: np.ndarray, token_index: int, mask: np.ndarray | None = None) -> Sampled:
        self.calls.append((token_index, mask))
        if np.isnan(logits_row).any():
            raise GenerationError("not a number")
        return Sampled(int(logits_row.argmax()))

    def observe(self, token_id: int) -> None:
        self.calls.append(token_id)


def test_each_token_has_its_own_counter_and_is_observed() -> None:
    recorder = Recorder()
    decoder = SampledDecoder(recorder)
    assert decoder.seed == 42
    assert decoder.propose(10) == ()
    for chosen in (2, 0, 1):
        assert decoder.select(np.eye(3, dtype=np.float32)[chosen : chosen + 1]) == Selection((Sampled(chosen),))
    assert recorder.calls == [(0, None), 2, (1, None), 0, (2, None), 1]


def test_a_row_that_cannot_be_sampled_changes_nothing() -> None:
    recorder = Recorder()
    decoder = SampledDecoder(recorder)
    with pytest.raises(GenerationError):
        decoder.select(np.full((1, 3), np.nan, np.float32))
    decoder.select(np.eye(3, dtype=np.float32)[:1])
    assert recorder.calls == [(0, None), (0, None), 0]
