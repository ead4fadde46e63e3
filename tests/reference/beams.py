"""Beam search as it is told, one list after the other: what the engine must find."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

Found = list[tuple[list[int], float, float]]
"""ids, log-probability and score, the best first"""


def beam_search(
    model: Callable[[list[int]], np.ndarray],
    prompt: list[int],
    *,
    beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    ends: Collection[int] = (),
) -> Found:
    running: list[tuple[list[int], float]] = [([], 0.0)]
    found: Found = []
    for length in range(1, max_tokens + 1):
        continuations = []
        for ids, logprob in running:
            row = model([*prompt, *ids]).astype(np.float64)
            row -= row.max()
            row -= np.log(np.exp(row).sum())
            continuations += [([*ids, token], logprob + float(row[token])) for token in range(row.size)]
        continuations.sort(key=lambda one: -one[1])
        found += [
            (ids, logprob, logprob / length**length_penalty)
            for ids, logprob in continuations[:beams]
            if ids[-1] in ends or length == max_tokens
        ]
        found.sort(key=lambda one: -one[2])
        del found[beams:]
        running = [one for one in continuations if one[0][-1] not in ends][:beams]
        if len(found) == beams and (early_stopping or running[0][1] / length**length_penalty <= found[-1][2]):
            break
    return found
