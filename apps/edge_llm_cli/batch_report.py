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

    def __init__(self, results: Results, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lines: int | None = None
        self._before = len(results.done)
        self._errors_before = results.errors
        self._clock = clock
        self._started: float | None = None
        self._model: str | None = None
        self._display = ProgressDisplay()
        self._tally = Tally()

    def begin(self, known: Survey | None, model: str) -> None:
        """The model is loaded; `known` is None for an input that can be read only once."""
        if known is not None:
            self._lines, self._before = known.lines, known.done
        self._model, self._started = model, self._clock()

    @property
    def errors(self) -> int:
        return self._errors_before + self._tally.errors

    def show(self, tally: Tally) -> None:
        """Tell how far the run is; a bar, on a terminal."""
        self._tally = tally
        done = self._before + self._done
        if self._lines is None:
            self._display("answering", 0, 0, f"{done} lines, {self._speed:.0f} tokens/s")
        else:
            left = self._seconds / self._done * (self._lines - done)
            detail = f"{done} of {self._lines}, {self._speed:.0f} tokens/s, {_clock_time(left)} left"
            self._display("answering", done, self._lines, detail)

    @contextlib.contextmanager
    def told_at_the_end(self, *, as_json: bool) -> Iterator[None]:
        """Tell the numbers however the block ends, once it has begun: what is done is done."""
        complete = interrupted = False
        try:
            with self._display:
                yield
            complete = True
        except KeyboardInterrupt:
            interrupted = True
            raise
        finally:
            if as_json and (interrupted or self._started is not None):
                console.data(self._as_object(complete=complete))
            elif self._started is not None:
                console.note(self._as_line())
                if self.errors:
                    console.note(self._about_errors())

    @property
    def _done(self) -> int:
        return self._tally.answered + self._tally.errors

    @property
    def _seconds(self) -> float:
        return 0.0 if self._started is None else self._clock() - self._started

    @property
    def _speed(self) -> float:
        seconds = self._seconds
        return self._tally.completion_tokens / seconds if seconds > 0 else 0.0

    def _as_line(self) -> str:
        tally = self._tally
        if not self._done and self._before == self._lines:
            return f"nothing is left to do: {console.counted(self._before, 'line was', 'lines were')} done before"
        parts = [f"{tally.answered} answered", console.counted(tally.errors, "error", "errors")]
        if self._before:
            parts.append(f"{self._before} done before")
        if self._lines is not None and (left := self._lines - self._before - self._done):
            parts.append(f"{left} left")
        tokens = f"{tally.completion_tokens} tokens in {_clock_time(self._seconds)} ({self._speed:.1f} tokens/s)"
        read = f"{tally.prompt_tokens} prompt tokens, {tally.cached_tokens} of them cached"
        return f"{', '.join(parts)}; {tokens}; {read}"

    def _about_errors(self) -> str:
        """Why the exit code is 1: the lines of this run, and those of runs before, which nobody sees now."""
        lines = console.counted(self.errors, "line of the output holds an error", "lines of the output hold errors")
        if self._errors_before:
            earlier = "from before" if self._errors_before == self.errors else f"{self._errors_before} from before"
            lines += f" ({earlier}): what is deleted there is asked again"
        return f"exit code 1: {lines}"

    def _as_object(self, *, complete: bool) -> dict[str, object]:
        tally = self._tally
        return {
            "complete": complete,
            "lines": self._lines,
            "done_before": self._before,
            "answered": tally.answered,
            "errors": tally.errors,
            "errors_before": self._errors_before,
            "model": self._model,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "completion_tokens": tally.completion_tokens,
            "seconds": self._seconds,
            "tokens_per_s": self._speed,
        }


def _clock_time(seconds: float) -> str:
    """Hours, minutes and seconds, as `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
