"""shortest_match: how long the shortest text is that a regular expression matches, without building an automaton."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""(?P<escape>\\(?:[pPxuU]\{[^}]{0,64}\}|[pP].|x[0-9A-Fa-f]{2}|.))
    |(?P<flags>\(\?[a-zA-Z-]{1,16}\))
    |(?P<open>\((?:\?(?:P?<[^=!>][^>]{0,64}>|[a-zA-Z-]{0,16}:))?)
    |(?P<close>\))
    |(?P<or>\|)
    |(?P<repeat>(?:[*+?]|\{(?P<least>[0-9]+)(?:,[0-9]*)?\})\??)
    |(?P<anchor>[\^$])
    |(?P<one>[^\\])""",
    re.DOTALL | re.VERBOSE,
)
_IN_SET = re.compile(r"\\.|[\[\]]", re.DOTALL)
_NO_TEXT = frozenset("AzbBG")
"""letters after a backslash that stand for a place"""


def shortest_match(pattern: str) -> int:
    """A lower bound of the characters of any match. 0 where the syntax is none that we know: others refuse it.

    Raises `ValueError` for an expression that ends in the middle of an escape.
    """
    levels: list[list[int]] = [[0, -1, 0]]
    """of each open group: length so far, the shortest of the alternatives before (-1: none), the last item's length"""
    place, sound = 0, True
    while place < len(pattern):
        found = _TOKEN.match(pattern, place)
        if found is None:
            raise ValueError("it ends after a backslash")
        place = found.end() if found.group() != "[" else _after_set(pattern, place)
        if sound and not _count(found, levels):
            sound = False  # but its end is still looked at
    return _closed(levels[0]) if sound and len(levels) == 1 else 0


def _count(found: re.Match[str], levels: list[list[int]]) -> bool:
    """Adds what was found; False if it cannot be."""
    level = levels[-1]
    match found.lastgroup:
        case "open" if found.group() == "(" and found.string.startswith("?", found.end()):
            return False  # a look-around, or white space that means nothing
        case "open":
            levels.append([0, -1, 0])
        case "close":
            if len(levels) == 1:
                return False
            length = _closed(levels.pop())
            _add(levels[-1], length)
        case "or":
            level[:] = [0, _closed(level), 0]
        case "repeat" | "least":
            text = found.group()
            times = int(found["least"]) if found["least"] and len(found["least"]) < 10 else int(text[0] == "+")
            level[:] = [level[0] + (times - 1) * level[2], level[1], times * level[2]]
        case "flags":
            return "x" not in found.group()
        case "anchor":
            _add(level, 0)
        case "escape":
            _add(level, int(found.group()[1] not in _NO_TEXT))
        case _:
            _add(level, 1)
    return True


def _after_set(pattern: str, place: int) -> int:
    """Where the set of characters that begins here ends; sets may hold sets."""
    depth = 0
    for found in _IN_SET.finditer(pattern, place):
        mark = found.group()
        first = pattern[found.start() - 1] == "[" or pattern[found.start() - 2 : found.start()] == "[^"
        depth += (mark == "[") - (mark == "]" and not first)
        if depth == 0:
            return found.end()
    return len(pattern) - (pattern.endswith("\\"))


def _add(level: list[int], length: int) -> None:
    level[0] += length
    level[2] = length


def _closed(level: list[int]) -> int:
    return level[0] if level[1] < 0 else min(level[0], level[1])
