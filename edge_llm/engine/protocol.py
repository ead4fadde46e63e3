"""What an engine's process and the process that started it say to each other. Each request has a number of its own."""

from __future__ import annotations

from dataclasses import dataclass

from edge_llm.config import EngineConfig
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Event
from edge_llm.metrics import Statistics

Answer = str | tuple[int, ...] | Statistics | None

# --- to the engine ---


@dataclass(frozen=True, slots=True)
class Open:
    """Load the model of this folder. The first message, answered with `Loading` some times, then `Ready` or `Failed`."""

    folder: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request. `Reply` says that it runs, or why not; its events may already come before."""

    id: int
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request; nothing happens if there is none of this number."""

    id: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    id: int
    request: Request


@dataclass(frozen=True, slots=True)
class Detokenize:
    id: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Tell the engine's `Statistics`."""

    id: int


@dataclass(frozen=True, slots=True)
class Close:
    """End the requests, or wait for them; then say nothing more. May follow on another one to cut it short."""

    drain: bool


# --- from the engine ---


@dataclass(frozen=True, slots=True)
class Loading:
    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """The model cannot be loaded."""

    error: EdgeLLMError


@dataclass(frozen=True, slots=True)
class Reply:
    """To `Submit` (nothing), `Tokenize` (ids), `Detokenize` (a text), `Measure`; or what is wrong with it."""

    id: int
    value: Answer | EdgeLLMError = None


@dataclass(frozen=True, slots=True)
class Happened:
    """The next event of a request, or the error that ends it."""

    id: int
    event: Event | EdgeLLMError


@dataclass(frozen=True, slots=True)
class Closed:
    """The last message: nothing runs any more, and this is what the engine has done."""

    statistics: Statistics


ToEngine = Open | Submit | Cancel | Tokenize | Detokenize | Measure | Close
FromEngine = Loading | Ready | Failed | Reply | Happened | Closed
