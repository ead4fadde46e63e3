"""parse_body: JSON from strangers to plain values, within bounds; everything that is wrong with it is a 400."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from edge_llm.errors import quoted
from edge_llm_server.api_error import ApiError

MAX_DEPTH = 64
MAX_DIGITS = 32
MAX_OBJECTS = 32_768
"""more of them than any request needs would hold up everybody while they are looked at"""
_STRUCTURE = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""a bracket or a string; it cannot backtrack, and takes a string without an end whole, or time would grow with the square"""


def parse_body(data: bytes, what: str = "body") -> dict[str, Any]:
    """The object in `data`; messages call it `what`.

    Raises `ApiError` 400 for what is not UTF-8 or not JSON (NaN, Infinity, a byte order mark), for keys that stand twice
    in an object, numbers that no float holds or with more than 32 digits, half surrogate pairs, more than 64 levels or 32,768
    objects.
    """
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark")
        _check_depth(text)
        value = json.loads(
            text, object_pairs_hook=_Objects(), parse_constant=_refuse, parse_float=_float, parse_int=_integer
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError.invalid(f"the {what} holds half a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise ApiError.invalid(f"the {what} is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError.invalid(f"the {what} is not sound JSON: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise ApiError.invalid(f"the {what} is not a JSON object")
    return value


def _reason(error: Exception) -> str:
    """What is wrong, without what was sent."""
    return f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)


def _check_depth(text: str) -> None:
    """Raises `ValueError` beyond `MAX_DEPTH` levels. Counts outside of strings; unsound text fails later."""
    depth, place = 0, 0
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    while (found := _STRUCTURE.search(text, place)) is not None:
        place = found.end()
        mark = found.group()
        if mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        elif mark in "]}":
            depth -= 1


class _Objects:
    """Makes the objects of one body."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count += 1
        if self._count > MAX_OBJECTS:
            raise ValueError(f"it has more than {MAX_OBJECTS} objects")
        value = dict(pairs)
        if len(value) < len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise ValueError(f"the key {quoted(name)} stands twice in an object")
                seen.add(name)
        return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _float(text: str) -> float:
    if len(text) > 4 * MAX_DIGITS or not math.isfinite(value := float(text)):
        raise ValueError("a number is too long or too large")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(text)
