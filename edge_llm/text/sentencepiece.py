"""SentencePiece's byte-pair encoding: of all neighbours that make a piece, those of the best piece join first.

Not by the `tokenizers` library: it wants every pair that makes a piece spelled out, and for the 262,144 pieces of Gemma it
takes four times as long to load as all of this (docs/experiments.md).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from edge_llm.errors import ModelFormatError

SPACE = "\u2581"
"""stands for a space inside pieces"""
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""what a character without a piece is written in"""

_KEPT_WORDS = 1 << 14
_KEPT_LENGTH = 64
"""characters; longer words are not kept, so that nobody's text fills the memory"""


class SentencePieceEncoder:
    """Ids of text, as SentencePiece (arXiv:1808.06226) and llama.cpp give them. May be used by several threads at once."""

    def __init__(
        self,
        ids: Mapping[str, int],
        ranks: Sequence[int],
        *,
        whole: Mapping[str, int],
        gone: Collection[str],
        space_prefix: bool,
    ) -> None:
        """`ids` of pieces by text, and `ranks` of pieces by id: of two pieces the one with the lower rank is made first.

        Texts in `whole` are found before all else, the longest first; those in `gone` never come out. `space_prefix`: what
        is encoded begins with a space that nobody wrote. Raises `ModelFormatError` if a byte has no piece.
        """
        if not ids.keys() >= set(BYTE_PIECES):
            raise ModelFormatError("the vocabulary has no pieces for bytes")
        self._bytes = [ids[piece] for piece in BYTE_PIECES]
        self._ids = dict(ids)
        for text in (*BYTE_PIECES, *whole, *gone):
            self._ids.pop(text, None)
        self._ranks = ranks
        self._whole = whole
        self._whole_texts = re.compile(f"({'|'.join(map(re.escape, sorted(whole, key=len, reverse=True))) or '(?!)'})")
        before_space = {text[at - 1] for text in self._ids if (at := text.rfind(SPACE)) > 0}
        joined = f"(?<![{re.escape(''.join(sorted(before_space)))}])" if before_space else ""
        self._word_starts = re.compile(f"{joined}(?={SPACE})")
        self._prefix = SPACE if space_prefix else ""
        self._kept = lru_cache(_KEPT_WORDS)(self._word)

    def __call__(self, text: str, *, begins: bool = True) -> list[int]:
        """Ids of `text`; `begins` is False where it goes on from other text."""
        ids: list[int] = []
        for i, part in enumerate(self._whole_texts.split(text)):
            if i % 2:
                ids.append(self._whole[part])
            elif part:
                prefix = self._prefix if begins or i else ""
                for word in self._word_starts.split(prefix + part.replace(" ", SPACE)):
                    ids += self._kept(word) if len(word) <= _KEPT_LENGTH else self._word(word)
        return ids

    def _word(self, word: str) -> list[int]:
        """Ids of a text over whose ends no piece reaches."""
        ids: list[int] = []
        for piece in self._merged(word):
            token_id = self._ids.get(piece)
            if token_id is None:
                ids += (self._bytes[byte] for byte in piece.encode())
            else:
                ids.append(token_id)
        return ids

    def _merged(self, word: str) -> list[str]:
        """The word in pieces, and single characters that are none. Of equal ranks the leftmost pair joins first."""
        ids, ranks = self._ids, self._ranks
        parts = list(word)  # by where they start; "" once they are part of the one before
        after = list(range(1, len(word) + 1))
        before = list(range(-1, len(word) - 1))
        pairs = [
            (ranks[ids[pair]], at, at + 1, 2) for at, pair in enumerate(map(str.__add__, word, word[1:])) if pair in ids
        ]
        heapify(pairs)
        while pairs:
            _, left, right, size = heappop(pairs)
            if after[left] != right or len(parts[left]) + len(parts[right]) != size:
                continue  # one of the two has joined another since
            parts[left] += parts[right]
            after[left], after[right] = after[right], -1
            parts[right] = ""
            if after[left] < len(word):
                before[after[left]] = left
            for first, second in ((before[left], left), (left, after[left])):
                if first >= 0 and second < len(word) and (pair := parts[first] + parts[second]) in ids:
                    heappush(pairs, (ranks[ids[pair]], first, second, len(pair)))
        return [part for part in parts if part]
