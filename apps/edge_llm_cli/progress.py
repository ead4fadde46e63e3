"""ProgressDisplay: how far a download, an import or the compilation of the kernels is, on stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Self

from edge_llm_cli import console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LONG_STAGES = ("downloading", "importing", "compiling", "waiting", "evaluating", "writing", "trying")
_LICENCE = "licence: "


class ProgressDisplay:
    """Called as display(stage, done, total, detail): on a terminal a bar that vanishes, else a line for each long stage.

    A licence that must be told of is a line that stays, everywhere. Nothing is imported or shown until the first call.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None:
        if stage.startswith(_LICENCE):
            self.__exit__()
            console.note(stage)
            return
        changed, self._stage = stage != self._stage, stage
        label = f"{stage} ({total / 1e6:.0f} MB)" if total >= 10**6 and not detail else f"{stage} {detail}".rstrip()
        if not console.is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
            if changed and stage.startswith(_LONG_STAGES):
                console.note(f"{label} ...")
            return
        if self._bar is None:
            self._bar = _new_bar()
            self._bar.start()
        if changed:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(label, total=total or None)
        assert self._task is not None
        self._bar.update(self._task, description=label, completed=done, total=total or None)

    def kernels(self, _name: str, done: int, total: int) -> None:
        """The same for the compiler of the kernels, which reports function by function."""
        self("compiling kernels (once)", done, total)


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
