"""Texts in chunks, for what reads them as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

from hypothesis import strategies as st


class Transform(Protocol):
    def feed(self, chunk: str, /) -> Sequence[Any]: ...

    def flush(self) -> Sequence[Any]: ...


def read(transform: Transform, chunks: Iterable[str]) -> list[Any]:
    """All events, with texts of one kind in a row joined."""
    events: list[Any] = []
    for delta in (*(d for chunk in chunks for d in transform.feed(chunk)), *transform.flush()):
        if events and hasattr(delta, "text") and type(events[-1]) is type(delta):
            events[-1] = replace(delta, text=events[-1].text + delta.text)
        else:
            events.append(delta)
    return events


def chunked(pieces: Sequence[str]) -> st.SearchStrategy[list[str]]:
    """Texts made of `pieces`, cut anywhere."""
    return st.lists(st.sampled_from(pieces), max_size=14).map("".join).flatmap(cut_anywhere)


def cut_anywhere(text: str) -> st.SearchStrategy[list[str]]:
    def cut(places: set[int]) -> list[str]:
        bounds = [0, *sorted(places), len(text)]
        return [text[a:b] for a, b in pairwise(bounds)]

    return st.sets(st.integers(0, len(text)), max_size=12).map(cut)


def operations(make: Callable[[], Transform], text: str) -> int:
    """Python lines run while `text` is read character by character: what it costs, without a clock."""
    count = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    transform = make()
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for character in text:
            transform.feed(character)
        transform.flush()
    finally:
        sys.settrace(previous)
    return count
