"""Which field of a body an error is about, by the name that the client gave it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from edge_llm.errors import EdgeLLMError, TemplateError, quoted
from edge_llm_server.api_error import ApiError
from edge_llm_server.schemas import ChatBody, CompletionBody

Names = Mapping[str, str]
"""from the fields of OpenAI's chat to those that a client has sent in their stead"""
NO_NAMES: Names = {}

_COMMON_WORDS = frozenset({"model", "messages", "prompt", "n", "stream"})
"""fields that errors of other fields speak of"""
_FIELDS: Names = {
    **{name: name for name in (*ChatBody.model_fields, *CompletionBody.model_fields) if name not in _COMMON_WORDS},
    "lark": "grammar",
    "json_object": "response_format",
    "json_schema": "response_format",
    "schema": "response_format",
    "choice": "choices",
    "tool": "tools",
}
"""words of errors, and the field that they mean"""


def parameter_of(error: EdgeLLMError) -> str | None:
    """The first field that an error of the engine speaks of, before what it quotes."""
    if isinstance(error, TemplateError):  # these are somebody else's words
        return None
    said = re.split(r"[:'\"]", str(error), maxsplit=1)[0]
    return next((_FIELDS[word] for word in re.findall(r"[a-z]+(?:_[a-z]+)*", said) if word in _FIELDS), None)


def refusal(error: EdgeLLMError, param: str | None = None, names: Names = NO_NAMES) -> ApiError:
    """What a client is told of an error of its request; `param` is the field where the error names none."""
    return renamed(ApiError.of(error, parameter_of(error) or param), names)


def renamed(error: ApiError, names: Names) -> ApiError:
    """The error in the client's words."""
    if error.param is None or error.param not in names:
        return error
    own = names[error.param]
    return ApiError(
        error.status,
        re.sub(rf"\b{error.param}\b", own, str(error), count=1),
        kind=error.kind,
        param=own,
        code=error.code,
        retry_after_s=error.retry_after_s,
        extra=error.extra,
    )


@contextlib.contextmanager
def refusals(param: str | None = None, names: Names = NO_NAMES) -> Iterator[None]:
    """Errors of values become a 400 that names the field: `param`, or the one that they speak of."""
    try:
        yield
    except EdgeLLMError as error:
        told = refusal(error, None, names) if param is None else ApiError.of(error, param)
        raise told from None
    except ApiError as error:
        raise renamed(error, names) from None


def misfit(error: ValidationError, raw: Mapping[str, Any]) -> ApiError:
    """What a client is told of a body that does not fit: of the ways in which it could have, the one that goes furthest."""
    found = error.errors(include_url=False, include_input=False)
    path, first = max(((_path(one, raw), one) for one in found), key=lambda pair: _reach(*pair))
    name = ".".join(map(str, path))
    return ApiError.invalid(f"{quoted(name)}: {_said(first)}", str(path[0]) if path else None)


def _said(error: Mapping[str, Any]) -> str:
    """What is wrong; lengths not as pydantic has it: 'List should have at least 1 item after validation, not 0'."""
    match error["type"], error.get("ctx", {}):
        case (("too_short" | "string_too_short"), {"min_length": 1}):
            return "it must not be empty"
        case "too_short", {"min_length": least, "actual_length": length}:
            return f"it must have at least {least} items, not {length}"
        case "too_long", {"max_length": most, "actual_length": int(length)}:
            return f"it must have at most {most} items, not {length}"
        case _:
            return str(error["msg"])


def _reach(path: Sequence[int | str], error: Mapping[str, Any]) -> tuple[int, list[int], int]:
    """By what errors are compared: how deep they lie, how far in a list, and how much they say."""
    tried = len(path) < len(error["loc"])  # it is one kind of several, and to the others a `type` is always wrong
    if error["type"] == "missing":
        says = 1
    elif tried and path[-1:] == ["type"]:
        says = 0
    else:
        says = 2 if error["type"].endswith("_type") else 3
    return len(path), [place for place in path if isinstance(place, int)], says


def _path(error: Mapping[str, Any], raw: Any) -> list[int | str]:
    """Where it lies, without the names of the kinds that were tried."""
    path: list[int | str] = []
    for i, place in enumerate(error["loc"], 1):
        if (isinstance(raw, Mapping) and place in raw) or (isinstance(raw, list) and isinstance(place, int)):
            raw = raw[place]
        elif error["type"] != "missing" or i < len(error["loc"]):
            continue
        path.append(place)
    return path
