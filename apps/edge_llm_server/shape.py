"""What a protocol's words are made of: a shape of whole replies, and an encoder of streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from edge_llm.messages import Event
from edge_llm_server.answer import Answer
from edge_llm_server.api_error import ApiError


class Encoder(Protocol):
    """Events of a stream as text. `event` and `opening` may give nothing."""

    media_type: str

    def opening(self, index: int) -> str: ...
    def event(self, index: int, event: Event) -> str: ...
    def ending(self, index: int, answer: Answer) -> str: ...
    def closing(self, answers: Sequence[Answer]) -> str: ...

    def ping(self) -> str:
        """What says that the stream lives, and nothing else."""
        ...

    def error(self, error: ApiError) -> str:
        """The last words of a stream that failed."""
        ...


class ServerSentEvents:
    """What all streams of server-sent events have in common."""

    media_type = "text/event-stream"

    def ping(self) -> str:
        return ": ping\n\n"

    def error(self, error: ApiError) -> str:
        return f"data: {json.dumps(error.body)}\n\n"


class Shape(Protocol):
    """One protocol's words for complete answers."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]: ...


class StreamShape(Shape, Protocol):
    """And for answers in pieces."""

    def stream(self) -> Encoder: ...
