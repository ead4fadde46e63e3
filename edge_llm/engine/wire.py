"""Requests, events and errors as bytes: JSON in frames that begin with their length.

The JSON is Python's: it may hold NaN and Infinity, and halves of surrogate pairs stay what they are. Nothing is read but the
kinds named here, so whatever comes, it is values of theirs or a `WireError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, get_args

from edge_llm.config import EngineConfig
from edge_llm.engine.codec import WireError, tagged
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.protocol import FromEngine, Happened, ToEngine
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Event, TextDelta

MAX_FRAME_BYTES = 64 << 20
_HEADER_BYTES = 4

_any = tagged(
    [*get_args(ToEngine), *get_args(FromEngine), Request, *get_args(Event), EngineInfo, EngineConfig, EdgeLLMError]
)


def encode(value: object) -> dict[str, Any]:
    """A request, event, error or message of the protocol as plain JSON values, with the name of its class.

    Raises `WireError` if it, or anything in it, is of another type.
    """
    return _any.encode(value)  # type: ignore[no-any-return]


def decode(raw: object) -> Any:
    """The value that `encode` made this of. Raises `WireError` for anything else."""
    return _any.decode(raw)


def frame(values: Iterable[object]) -> bytes:
    """Several values as one frame. Raises `WireError` if one cannot be written, or all are more than a frame may hold."""
    text = json.dumps([_packed(value) for value in values], ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"{len(data)} bytes, more than the {MAX_FRAME_BYTES} of a frame")
    return len(data).to_bytes(_HEADER_BYTES, "big") + data


class FrameReader:
    """Values from bytes as they come, however they are cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Any]:
        """The values that these bytes complete. Raises `WireError` for bytes that are none; the reader is of no use then."""
        self._buffer += data
        values: list[Any] = []
        start = 0
        while len(self._buffer) - start >= _HEADER_BYTES:
            size = int.from_bytes(self._buffer[start : start + _HEADER_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {size} bytes")
            end = start + _HEADER_BYTES + size
            if len(self._buffer) < end:
                break
            values += _values(self._buffer[start + _HEADER_BYTES : end])
            start = end
        del self._buffer[:start]
        return values


def _values(payload: bytearray) -> list[Any]:
    try:
        raw = json.loads(payload.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise WireError("a frame that is no JSON") from None
    if not isinstance(raw, list):
        raise WireError("a frame that is no list")
    return [_unpacked(item) for item in raw]


def _packed(value: object) -> Any:
    """As `encode`, but for what there is most of: more text of a request is its number and the text."""
    if type(value) is Happened and type(value.event) is TextDelta:
        number, text = value.id, value.event.text
        if not value.event.tokens and type(number) is int and type(text) is str:
            return [number, text]
    return encode(value)


def _unpacked(raw: object) -> Any:
    if type(raw) is list and len(raw) == 2 and type(raw[0]) is int and type(raw[1]) is str:
        return Happened(raw[0], TextDelta(raw[1]))
    return decode(raw)
