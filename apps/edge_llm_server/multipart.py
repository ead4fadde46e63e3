"""One file out of a multipart/form-data body (RFC 7578), where it lies on disk; nothing is decoded or copied here."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass

from edge_llm_server.api_error import ApiError

MAX_PARTS = 16
MAX_HEAD = 4096
MAX_FIELD = 1024
_BOUNDARY = re.compile(rb'(?:^|;)\s*boundary=(?:"([^"\r\n]{1,70})"|([!-:<-~]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"\r\n]{1,64})"')
_FILE_NAME = re.compile(rb'[;\s]filename="([^"\r\n]{0,512})"')


@dataclass(frozen=True, slots=True)
class Form:
    """The `fields`, and where the content of the one file lies, in bytes."""

    fields: dict[str, str]
    filename: str
    start: int
    end: int


def read_form(data: mmap.mmap | bytes, content_type: bytes) -> Form:
    """The form in `data`. Raises `ApiError` 400 unless it is one, with exactly one file."""
    found = _BOUNDARY.search(content_type.partition(b";")[2])
    if found is None:
        raise ApiError.invalid("the Content-Type names no boundary")
    mark = b"--" + (found[1] or found[2])
    fields: dict[str, str] = {}
    file: tuple[str, int, int] | None = None
    if data[: len(mark)] != mark:
        raise ApiError.invalid("the body does not begin with its boundary")
    place = len(mark)
    for _ in range(MAX_PARTS):
        if data[place : place + 2] == b"--":
            break
        name, filename, start = _head(data, place)
        end = data.find(b"\r\n" + mark, start)
        if end < 0:
            raise ApiError.invalid("a part of the form has no end")
        place = end + 2 + len(mark)
        if filename is None:
            fields[name] = _field(data, name, start, end)
        elif file is not None:
            raise ApiError.invalid("the form holds more than one file")
        else:
            file = filename, start, end
    else:
        raise ApiError.invalid(f"the form has more than {MAX_PARTS} parts")
    if file is None:
        raise ApiError.invalid("the form holds no file", "file")
    return Form(fields, *file)


def _head(data: mmap.mmap | bytes, place: int) -> tuple[str, str | None, int]:
    """Name and maybe file name of the part whose boundary ends at `place`, and where its content begins."""
    end = data.find(b"\r\n\r\n", place, place + MAX_HEAD)
    head = data[place:end] if end >= 0 and data[place : place + 2] == b"\r\n" else b""
    lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")]
    name = _NAME.search(lines[0]) if len(lines) == 1 else None
    if name is None:
        raise ApiError.invalid("a part of the form has no name")
    filename = _FILE_NAME.search(lines[0])
    shown = None if filename is None else filename[1].decode("utf-8", "replace")
    return name[1].decode("utf-8", "replace"), shown, end + 4


def _field(data: mmap.mmap | bytes, name: str, start: int, end: int) -> str:
    if end - start > MAX_FIELD:
        raise ApiError.invalid(f"the field {name[:64]!a} is too long")
    return bytes(data[start:end]).decode("utf-8", "replace")
