"""A batch on Ray: the same worker as actors of Ray Data, where the work outgrows one machine. Needs the extra `ray`.

This process reads the input and writes the output; what goes to the actors is where lines stand. So the input must lie at the
same path on every machine, as must a model that is given by its path.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from edge_llm.errors import EngineStoppedError, InputError
from edge_llm_batch.endpoints import ENDPOINTS, Answering, Defaults
from edge_llm_batch.lines import Line, LineId, read_lines
from edge_llm_batch.pool import TaskPool
from edge_llm_batch.results import Results
from edge_llm_batch.run import BatchRun, Tally, fault_result
from edge_llm_batch.task import read_tasks

LINES_A_CALL = 64
"""what an actor answers before it hands anything back: lost if it dies"""

OpenEngine = Callable[[], AbstractContextManager[tuple[Answering, float]]]


class RayWorker:
    """An engine in a process of its own. A call takes places of lines and gives their results."""

    def __init__(self, opened: OpenEngine, path: str, job: bytes, defaults: Defaults) -> None:
        self._life = contextlib.ExitStack()
        self._engine, _ = self._life.enter_context(opened())
        self._path, self._job, self._defaults = path, job, defaults
        self.done: dict[int, LineId] = {}
        self.errors = 0
        self._results: list[str] = []

    def __call__(self, places: dict[str, Any]) -> dict[str, Any]:
        """`offset` and `number` of lines as arrays; `result` as JSON texts."""
        numbers = list(zip(places["offset"].tolist(), places["number"].tolist(), strict=True))
        pool = TaskPool(max_tasks=len(numbers))
        pool.fill(read_tasks(self._lines(numbers), ENDPOINTS, lambda _: True))
        self._results = []
        asyncio.run(BatchRun(self._engine, self, self._defaults).run(pool))
        return {"result": self._results}

    def write(self, result: dict[str, Any]) -> None:
        self._results.append(json.dumps(result))

    def close(self) -> None:
        self._life.close()

    def _lines(self, places: Iterable[tuple[int, int]]) -> Iterator[Line]:
        with open(self._path, "rb") as file:
            for offset, number in places:
                file.seek(offset)
                yield from islice(read_lines(file, self._job, number), 1)


def run_on_ray(
    path: str,
    job: bytes,
    wanted: Callable[[LineId], bool],
    worker: tuple[OpenEngine, Defaults],
    results: Results,
    told: Callable[[Tally], None],
    *,
    workers: int,
) -> None:
    """Answer the wanted lines of a file by so many `workers`.

    Raises `InputError` where Ray is not installed, `EngineStoppedError` if a worker cannot go on, and what `results` raise.
    """
    ray = _ray()
    tally = Tally()

    def take(result: dict[str, Any]) -> None:
        results.write(result)
        tally.add(result)
        told(tally)

    offsets, numbers = array("q"), array("q")
    with open(path, "rb") as file:
        here = 0

        def noted(lines: Iterable[Line]) -> Iterator[Line]:
            nonlocal here
            for line in lines:
                here = line.offset
                yield line

        for task in read_tasks(noted(read_lines(file, job)), ENDPOINTS, wanted):
            if task.fault is not None:
                take(fault_result(task))
            else:
                offsets.append(here)
                numbers.append(task.line.number)
    if not numbers:
        return
    opened, defaults = worker
    try:
        _start(ray)
        import pyarrow  # Ray Data's own

        # blocks as they are: any step before the actors would wait for a CPU that these hold
        calls = range(0, len(numbers), LINES_A_CALL)
        places = [
            pyarrow.table({"offset": offsets[i : i + LINES_A_CALL], "number": numbers[i : i + LINES_A_CALL]})
            for i in calls
        ]
        answers = ray.data.from_arrow(places).map_batches(
            RayWorker,
            fn_constructor_args=(opened, path, job, defaults),
            batch_size=LINES_A_CALL,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers),
        )
        for row in answers.iter_rows():
            take(json.loads(row["result"]))
    except ray.exceptions.RayError as error:
        raise EngineStoppedError(f"a worker of the batch failed: {str(error).splitlines()[-1]}") from None
    finally:
        ray.shutdown()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    try:
        import ray
        import ray.data
    except ImportError:
        raise InputError("Ray is not installed", hint='pip install "edge-llm[ray]"') from None
    return ray


def _start(ray: Any) -> None:
    """The cluster that RAY_ADDRESS names, or one of this machine alone."""
    local = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **local)
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
