"""Where the messages of a conversation lie among the tokens of its prompt."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter

from edge_llm.text.prompt import RenderedPrompt


def token_spans(text: str, start: int, end: int, tokens: Sequence[bytes]) -> list[tuple[int, int]]:
    """(start, end) of the characters of which each token holds bytes; the tokens are those of text[start:end].

    Where they do not say just this text (a normaliser changed it, a byte has no token), each is taken to hold all of it.
    """
    data = text[start:end].encode("utf-8", "replace")
    said = b"".join(tokens)
    added = said == b" " + data  # by the tokenizer, before a beginning
    if said != data and not added:
        return [(start, end)] * len(tokens)
    characters = range(len(data) + 1) if data.isascii() else _characters_of_bytes(data)
    ends = accumulate(map(len, tokens), initial=-int(added))
    return [
        (start + characters[max(first, 0)], start + (characters[last - 1] + 1 if last > 0 else 0))
        for first, last in pairwise(ends)
    ]


def _characters_of_bytes(data: bytes) -> Sequence[int]:
    """For each byte of UTF-8, and for the end, the index of the character that it belongs to."""
    begun = accumulate(byte & 0xC0 != 0x80 for byte in data)  # a continuation byte is 10xxxxxx
    characters = array("I", (count - 1 for count in begun))
    characters.append(characters[-1] + 1)
    return characters


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
