"""BatchReport: what is told of a batch: a bar while it runs, and its numbers at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from edge_llm_batch.run import Tally

from edge_llm_cli import console
from edge_llm_cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from edge_llm_batch.lines import Survey
    from edge_llm_batch.results import Results


class BatchReport:
    """`errors` counts the lines of the whole output that are no answers."""

    def __init__(
        self, results: Results, known: Survey | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`known` is None for an input that can be read only once."""
        self._lines = None if known is None else known.lines
        self._before = len(results.done) if known is None else known.done
        self._errors_before = results.errors
        self._clock = clock
        self._started = clock()
        self._display = ProgressDisplay()
        self._tally = Tally()

    @property
    def errors(self) -> int:
        return self._errors_before + self._tally.errors

    def show(self, tally: Tally) -> None:
        """Tell how far the run is; a bar, on a terminal."""
        self._tally = tally
        done = self._before + self._done
        seconds = self._clock() - self._started
        if self._lines is None:
            self._display("answering", 0, 0, f"{done} lines, {self._speed(seconds):.0f} tokens/s")
        else:
            left = seconds / self._done * (self._lines - done)
            detail = f"{done} of {self._lines}, {self._speed(seconds):.0f} tokens/s, {_clock_time(left)} left"
            self._display("answering", done, self._lines, detail)

    @contextlib.contextmanager
    def told_at_the_end(self, model: str, *, as_json: bool) -> Iterator[None]:
        """Tell the numbers however the block ends: what is done is done."""
        complete = False
        try:
            with self._display:
                yield
            complete = True
        finally:
            seconds = self._clock() - self._started
            if as_json:
                console.data(self._as_object(model, seconds, complete=complete))
            else:
                console.note(self._as_line(seconds))

    @property
    def _done(self) -> int:
        return self._tally.answered + self._tally.errors

    def _speed(self, seconds: float) -> float:
        return self._tally.completion_tokens / seconds if seconds > 0 else 0.0

    def _as_line(self, seconds: float) -> str:
        tally = self._tally
        parts = [f"{tally.answered} answered", f"{tally.errors} errors"]
        if self._before:
            parts.append(f"{self._before} done before")
        if self._lines is not None and (left := self._lines - self._before - self._done):
            parts.append(f"{left} left")
        tokens = f"{tally.completion_tokens} tokens in {_clock_time(seconds)} ({self._speed(seconds):.1f} tokens/s)"
        read = f"{tally.prompt_tokens} prompt tokens, {tally.cached_tokens} of them cached"
        return f"{', '.join(parts)}; {tokens}; {read}"

    def _as_object(self, model: str, seconds: float, *, complete: bool) -> dict[str, object]:
        tally = self._tally
        return {
            "complete": complete,
            "lines": self._lines,
            "done_before": self._before,
            "answered": tally.answered,
            "errors": tally.errors,
            "model": model,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "completion_tokens": tally.completion_tokens,
            "seconds": seconds,
            "tokens_per_s": self._speed(seconds),
        }


def _clock_time(seconds: float) -> str:
    """Hours, minutes and seconds, as `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
