"""edge_llm: small language models on your own machine.

    from edge_llm import Engine, Message

    with Engine.load("smollm2-135m-instruct") as engine:
        print(engine.chat([Message.user("What is the capital of France?")]).text())

Importing this package loads nothing heavy: each name is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_llm.config import EngineConfig
    from edge_llm.engine.engine import Engine
    from edge_llm.engine.handle import Handle
    from edge_llm.engine.request import Request
    from edge_llm.errors import (
        ContextLengthError,
        DownloadError,
        EdgeLLMError,
        EngineStoppedError,
        GenerationError,
        InputError,
        IntegrityError,
        KernelError,
        ModelFormatError,
        ModelNotFoundError,
        OutdatedModelError,
        ParameterError,
        QueueFullError,
        RuntimeFailure,
        SessionError,
        StorageError,
        TemplateError,
        UnsupportedModelError,
    )
    from edge_llm.messages import (
        Beam,
        Choice,
        Event,
        Finished,
        FinishReason,
        Message,
        PromptProgress,
        ReasoningDelta,
        Role,
        TextDelta,
        Timings,
        TokenInfo,
        TokenLogprob,
        Tool,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from edge_llm.metrics import HistogramSnapshot, Statistics
    from edge_llm.sampling.grammar import Grammar
    from edge_llm.sampling.params import SamplingParams
    from edge_llm.toolbox.approval import Approval, Decision, Permission
    from edge_llm.toolbox.runner import LocalTool, ToolRunner

__version__ = "0.1.0"

_HOMES = {
    "edge_llm.config": ("EngineConfig",),
    "edge_llm.engine.engine": ("Engine",),
    "edge_llm.engine.handle": ("Handle",),
    "edge_llm.engine.request": ("Request",),
    "edge_llm.errors": (
        "ContextLengthError",
        "DownloadError",
        "EdgeLLMError",
        "EngineStoppedError",
        "GenerationError",
        "InputError",
        "IntegrityError",
        "KernelError",
        "ModelFormatError",
        "ModelNotFoundError",
        "OutdatedModelError",
        "ParameterError",
        "QueueFullError",
        "RuntimeFailure",
        "SessionError",
        "StorageError",
        "TemplateError",
        "UnsupportedModelError",
    ),
    "edge_llm.messages": (
        "Beam",
        "Choice",
        "Event",
        "FinishReason",
        "Finished",
        "Message",
        "PromptProgress",
        "ReasoningDelta",
        "Role",
        "TextDelta",
        "Timings",
        "TokenInfo",
        "TokenLogprob",
        "Tool",
        "ToolCall",
        "ToolCallDelta",
        "Usage",
    ),
    "edge_llm.metrics": ("HistogramSnapshot", "Statistics"),
    "edge_llm.sampling.grammar": ("Grammar",),
    "edge_llm.sampling.params": ("SamplingParams",),
    "edge_llm.toolbox.approval": ("Approval", "Decision", "Permission"),
    "edge_llm.toolbox.runner": ("LocalTool", "ToolRunner"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Approval",
    "Beam",
    "Choice",
    "ContextLengthError",
    "Decision",
    "DownloadError",
    "EdgeLLMError",
    "Engine",
    "EngineConfig",
    "EngineStoppedError",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationError",
    "Grammar",
    "Handle",
    "HistogramSnapshot",
    "InputError",
    "IntegrityError",
    "KernelError",
    "LocalTool",
    "Message",
    "ModelFormatError",
    "ModelNotFoundError",
    "OutdatedModelError",
    "ParameterError",
    "Permission",
    "PromptProgress",
    "QueueFullError",
    "ReasoningDelta",
    "Request",
    "Role",
    "RuntimeFailure",
    "SamplingParams",
    "SessionError",
    "Statistics",
    "StorageError",
    "TemplateError",
    "TextDelta",
    "Timings",
    "TokenInfo",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolRunner",
    "UnsupportedModelError",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
