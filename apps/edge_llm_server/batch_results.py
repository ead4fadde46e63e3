"""SplitResults: a batch's answers in one file and its errors in another, as OpenAI gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_llm_batch.lines import LineId
from edge_llm_batch.results import ResultFile


class SplitResults:
    """`done` are the lines that are in either file already, `errors` how many of them in vain."""

    def __init__(self, path: Path) -> None:
        """The files are called `path` with an ending each. Raises `StorageError`."""
        self.output, self.errors_path = path.with_suffix(".output"), path.with_suffix(".errors")
        self._output, self._errors = ResultFile(self.output), ResultFile(self.errors_path)
        self.done: dict[int, LineId] = {**self._output.done, **self._errors.done}
        self.errors = len(self._errors.done)
        self.count = len(self.done)

    def write(self, result: dict[str, Any]) -> None:
        response = result["response"]
        failed = response is None or response["status_code"] != 200
        (self._errors if failed else self._output).write(result)
        self.errors += failed
        self.count += 1

    def close(self) -> None:
        self._output.close()
        self._errors.close()
