"""Task: what one line of the input asks for, or what is wrong with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_llm_server.api_error import ApiError
from edge_llm_server.body import parse_body

from edge_llm.errors import quoted
from edge_llm_batch.lines import MAX_LINE_BYTES, Line, LineId

MAX_CUSTOM_ID = 512
_KEY_CHARACTERS = 4096
"""of a prompt that are compared: with those of 1,000 prompts that wait, little memory"""


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a line is no request; `code` is OpenAI's, where it has one."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Task:
    """A request, or a `fault` in its stead. Tasks with nearby `key`s have prompts that begin alike."""

    line: LineId
    size: int
    """bytes of the line"""
    custom_id: str | None = None
    url: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    fault: LineFault | None = None
    key: str = ""


def read_tasks(lines: Iterable[Line], urls: Iterable[str], wanted: Callable[[LineId], bool]) -> Iterator[Task]:
    """The tasks of the `wanted` lines. Of several lines with one custom_id the first counts, wanted or not."""
    seen: set[int] = set()  # digests: a set of texts would take several times the memory
    known = frozenset(urls)
    for line in lines:
        task = _task(line, known)
        if task.custom_id is not None:
            digest = int.from_bytes(hashlib.blake2b(task.custom_id.encode(), digest_size=8).digest(), "big")
            if digest in seen:
                fault = LineFault("duplicate_custom_id", f"the custom_id {quoted(task.custom_id)} was used before")
                # without its id, so that whoever reads the output by ids finds the answer to the first
                task = Task(line.id, task.size, fault=fault)
            seen.add(digest)
        if wanted(line.id):
            yield task


def _task(line: Line, urls: frozenset[str]) -> Task:
    if line.data is None:
        return Task(line.id, 0, fault=LineFault("line_too_long", f"a line has at most {MAX_LINE_BYTES >> 20} MiB"))
    size = len(line.data)
    try:
        given = parse_body(line.data, "line")
    except ApiError as error:
        return Task(line.id, size, fault=LineFault("invalid_json_line", str(error)))
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        code = "missing_required_parameter" if custom_id is None else "invalid_custom_id"
        return Task(line.id, size, fault=LineFault(code, message))
    url, body = given.get("url"), given.get("body")
    fault = _fault(given, urls)
    if fault is not None:
        return Task(line.id, size, custom_id, fault=fault)
    assert isinstance(url, str), "a known one"
    assert isinstance(body, dict), "it was looked at"
    return Task(line.id, size, custom_id, url, body, key=_key(body))


def _fault(given: Mapping[str, Any], urls: frozenset[str]) -> LineFault | None:
    for name in ("method", "url", "body"):
        if given.get(name) is None:
            return LineFault("missing_required_parameter", f"{name} is missing")
    method, url = given["method"], given["url"]
    if method != "POST":
        return LineFault("invalid_method", "method must be POST")
    if not isinstance(url, str) or url not in urls:
        shown = quoted(url) if isinstance(url, str) else "what is given"
        return LineFault("invalid_url", f"url must be {' or '.join(sorted(urls))}, not {shown}")
    if not isinstance(given["body"], dict):
        return LineFault("invalid_body", "body must be an object")
    return None


def _key(body: Mapping[str, Any]) -> str:
    begin = [
        body.get("tools"),
        body.get("instructions"),
        body.get("messages") or body.get("prompt") or body.get("input"),
    ]
    return json.dumps(begin)[:_KEY_CHARACTERS]
