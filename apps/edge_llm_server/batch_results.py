"""SplitResults: a batch's answers in one file and its errors in another, as OpenAI gives them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edge_llm_batch.lines import LineId
from edge_llm_batch.results import ResultFile


def result_paths(path: Path) -> tuple[Path, Path]:
    """Where the answers and the errors of a batch are that is called `path`."""
    return path.with_suffix(".output"), path.with_suffix(".errors")


def size_of(paths: Iterable[Path]) -> int:
    """Bytes of all of them that are there."""
    return sum(path.stat().st_size for path in paths if path.exists())


class SplitResults:
    """`done` are the lines that are in either file already, `errors` how many of them in vain."""

    def __init__(self, path: Path) -> None:
        """The files are called `path` with an ending each. Raises `StorageError`."""
        self._paths = result_paths(path)
        output, errors = self._paths
        self._output, self._errors = ResultFile(output), ResultFile(errors)
        self.done: dict[int, LineId] = {**self._output.done, **self._errors.done}
        self.errors = len(self._errors.done)
        self.count = len(self.done)

    @property
    def size(self) -> int:
        """Bytes of both."""
        return size_of(self._paths)

    def write(self, result: dict[str, Any]) -> None:
        response = result["response"]
        failed = response is None or response["status_code"] != 200
        (self._errors if failed else self._output).write(result)
        self.errors += failed
        self.count += 1

    def close(self) -> None:
        self._output.close()
        self._errors.close()
