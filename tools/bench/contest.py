"""Contest: the contestants' workers side by side, asked alternately. A cell that fails for one of them costs nobody else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tools.bench.cells import Cell
from tools.bench.figures import CellResult
from tools.bench.peers import Contestant
from tools.bench.worker_process import WorkerError, WorkerProcess

_PAUSE_S = 0.02
"""before each measurement: the threads of the last one's worker stop spinning"""


class Contest:
    """Workers with the same number of threads. Use it as a context manager."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        *,
        threads: int,
        context: int,
        sequences: int,
        logs: Path,
        timeout_s: float,
    ) -> None:
        self._contestants, self._logs, self._timeout_s = contestants, logs, timeout_s
        self._threads, self._context, self._sequences = threads, context, sequences
        self._workers: dict[str, WorkerProcess] = {}
        self._gone: dict[str, str] = {}
        self.info: dict[str, dict[str, object]] = {}
        """what each worker says of itself"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def measure(self, cell: Cell) -> CellResult:
        """Ask everybody, in each round beginning with another one."""
        result = CellResult(cell)
        for contestant in self._contestants:
            self._ask(contestant, cell, result, warm_up=True)
        for turn in range(cell.rounds):
            first = turn % len(self._contestants)
            for contestant in (*self._contestants[first:], *self._contestants[:first]):
                time.sleep(_PAUSE_S)
                value = self._ask(contestant, cell, result)
                result.values.setdefault(contestant.name, []).append(value)
        return result

    def _ask(self, contestant: Contestant, cell: Cell, result: CellResult, *, warm_up: bool = False) -> float | None:
        """The cell's figure, or None after noting what is in the way; who has failed is not asked again for this cell."""
        name = contestant.name
        if name in result.failures:
            return None
        try:
            reply = self._worker(contestant).ask(cell.request(warm_up=warm_up))
        except WorkerError as error:
            dead = self._workers.pop(name, None)  # the next cell starts a new one
            if dead is not None:
                dead.close()
            result.failures[name] = str(error)
            return None
        if "error" in reply:
            result.failures[name] = str(reply["error"])
        return cell.unit.figure(reply["seconds"], cell.count) if "seconds" in reply else None

    def _worker(self, contestant: Contestant) -> WorkerProcess:
        """Its running worker. One that does not even start is not tried again. Raises `WorkerError`."""
        name = contestant.name
        if name in self._gone:
            raise WorkerError(self._gone[name])
        if name not in self._workers:
            options = contestant.options(self._threads, self._context, self._sequences)
            log = self._logs / f"{name}-{self._threads}.log"
            try:
                self._workers[name] = WorkerProcess(contestant.command("serve", options), log, self._timeout_s)
            except WorkerError as error:
                self._gone[name] = f"its worker does not start: {error}"
                raise WorkerError(self._gone[name]) from None
            self.info[name] = self._workers[name].info
        return self._workers[name]
