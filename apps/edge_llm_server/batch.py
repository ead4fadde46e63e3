"""Batch: what is known of one batch, on disk too, how clients see it, and how many lines it may have."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_llm_server.api_error import ApiError

MAX_LINES = 50_000
"""of a batch, as OpenAI has it: each leaves a result, if only that it is no request. As many may be blank"""
_ID = re.compile(r"batch_[0-9a-f]{24}")
_OPEN = frozenset({"validating", "in_progress", "cancelling", "finalizing"})


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch; times are Unix times, by the name of the status that they began."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    model: str
    metadata: dict[str, str] | None = None
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    fault: str | None = None

    @classmethod
    def read(cls, path: Path) -> Batch | None:
        """A stored batch; None for what is none."""
        try:
            batch = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return batch if _ID.fullmatch(batch.id) and isinstance(batch.times.get("validating"), int) else None

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.status in _OPEN

    def entered(self, status: str, **changes: Any) -> Batch:
        return replace(self, status=status, times={**self.times, status: int(time.time())}, **changes)

    @property
    def end(self) -> str:
        """The status that one which is `finalizing` comes to."""
        return "failed" if self.fault is not None else "cancelled" if "cancelling" in self.times else "completed"

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        fault = {"object": "list", "data": [{"code": "failed", "message": self.fault, "line": None, "param": None}]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": fault if self.fault else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": None if self.open else self.output_file_id,
            "error_file_id": None if self.open else self.error_file_id,
            "created_at": self.times["validating"],
            **{f"{name}_at": self.times.get(name) for name in names},
            "expires_at": None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
            "model": self.model,
        }


def check_lines(path: Path) -> None:
    """Raises `ApiError` for a file with more lines than a batch may have."""
    filled = blank = 0
    begun = False
    with path.open("rb") as file:
        while piece := file.readline(1 << 20):
            begun = begun or bool(piece.strip(b" \t\r\n"))
            if piece.endswith(b"\n"):
                filled += begun
                blank += not begun
                begun = False
            if max(filled + begun, blank) > MAX_LINES:
                message = f"a batch has at most {MAX_LINES:,} lines, and as many blank ones: make several of this file"
                raise ApiError.invalid(message, "input_file_id", "too_many_lines")
