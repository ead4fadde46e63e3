"""The slow truth of SentencePiece's byte-pair encoding: join the best pair, look again, until no pair is a piece."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise


def pieces_of(text: str, ranks: Mapping[str, int]) -> list[str]:
    """`text` in pieces (keys of `ranks`, the lowest first; of equals the leftmost) and single characters."""
    parts = list(text)
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
