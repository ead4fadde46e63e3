"""How surprising each token of an answer was, and what it looks like; pure."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_llm.messages import TokenInfo, TokenLogprob
from edge_llm.text.terminal import clean

LEVELS = (1.0, 2.0, 3.5, 5.5, 8.0)
"""bits from which on a token is marked one step more"""
JUMP_BITS = 3.5
"""what counts as a surprise when one jumps from one to the next"""


def bits(token: TokenLogprob) -> float:
    """Its surprise: -log2 of its probability."""
    return max(0.0, -token.logprob / math.log(2))


def level(surprise: float) -> int:
    """0 for what was expected, up to len(LEVELS)."""
    return sum(surprise >= bound for bound in LEVELS)


def perplexity(tokens: Sequence[TokenInfo]) -> float:
    """2 to the mean surprise; 1 for no tokens."""
    if not tokens:
        return 1.0
    return math.exp(min(700.0, -sum(token.chosen.logprob for token in tokens) / len(tokens)))


def texts(tokens: Sequence[TokenLogprob]) -> list[str]:
    """What each token adds to the text, harmless. A token that ends inside a character adds nothing; the next one adds it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [clean(decoder.decode(token.data)) for token in tokens]


def label(token: TokenLogprob) -> str:
    """A token by itself on one line, with spaces and line ends to be seen; bytes that are no text as hex."""
    try:
        text = clean(token.data.decode("utf-8"))
    except UnicodeDecodeError:
        return "⟨" + token.data.hex(" ") + "⟩"
    return text.replace(" ", "·").replace("\n", "↵").replace("\t", "→") or "⟨empty⟩"


@dataclass(frozen=True, slots=True)
class Alternative:
    """One row of the list: a token that could have stood there."""

    token: TokenLogprob
    chosen: bool

    @property
    def probability(self) -> float:
        return math.exp(min(0.0, self.token.logprob))


def alternatives(info: TokenInfo) -> list[Alternative]:
    """The most probable tokens of a place, best first, the chosen one always among them."""
    rows = [Alternative(token, token.token_id == info.chosen.token_id) for token in info.alternatives]
    if not any(row.chosen for row in rows):
        rows.append(Alternative(info.chosen, True))
    return rows
