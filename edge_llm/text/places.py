"""Where the messages of a conversation lie among the tokens of its prompt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter

from edge_llm.text.prompt import RenderedPrompt


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
