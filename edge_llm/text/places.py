"""Where the messages of a conversation lie among the tokens of its prompt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter

from edge_llm.text.prompt import RenderedPrompt


def token_spans(text: str, start: int, tokens: Sequence[bytes]) -> list[tuple[int, int]]:
    """(start, end) of the characters that each token holds a part of; `text` begins at character `start` of the prompt.

    Where the tokens do not say exactly the text (a space that a tokenizer puts before it, half a surrogate pair), nobody
    knows which lies where, and each gets the whole text.
    """
    if b"".join(tokens) != text.encode("utf-8", "replace"):
        return [(start, start + len(text))] * len(tokens)
    first_bytes = [0, *accumulate(len(character.encode("utf-8", "replace")) for character in text)]
    ends = list(accumulate(map(len, tokens)))
    return [
        (start + bisect_right(first_bytes, end - len(token)) - 1, start + bisect_left(first_bytes, end))
        for token, end in zip(tokens, ends, strict=True)
    ]


def message_places(prompt: RenderedPrompt, spans: Sequence[tuple[int, int]]) -> tuple[range, ...]:
    """For each message the tokens, from the first to the last, that hold text of its content.

    `spans` are (start, end) of the characters of each token, in order. A message whose content the prompt does not show
    (it has none, or the template changed it beyond recognition) lies between its neighbours.
    """
    known = _known_places(prompt, spans)
    shown = sorted(known)
    places = []
    for index in range(len(prompt.messages)):
        if index in known:
            places.append(known[index])
            continue
        i = bisect_left(shown, index)
        before = known[shown[i - 1]].stop if i > 0 else 0
        after = known[shown[i]].start if i < len(shown) else len(spans)
        places.append(range(before, max(before, after)))
    return tuple(places)


def _known_places(prompt: RenderedPrompt, spans: Sequence[tuple[int, int]]) -> dict[int, range]:
    known: dict[int, range] = {}
    for start, end, origin in prompt.runs():
        index = prompt.message_of(origin)
        first = bisect_right(spans, start, key=itemgetter(1))
        stop = bisect_left(spans, end, key=itemgetter(0))
        if index is not None and first < stop:
            other = known.get(index, range(first, stop))
            known[index] = range(min(first, other.start), max(stop, other.stop))
    return known
