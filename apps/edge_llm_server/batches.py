"""Batches: files of requests that are answered when nobody else waits, one after the other, across restarts too."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edge_llm.engine.client import EngineClient
from edge_llm.engine.handle import Handle
from edge_llm.engine.host import EngineHost
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError, EngineStoppedError, StorageError
from edge_llm.paths import obstacle, private_dir
from edge_llm_server.api_error import ApiError
from edge_llm_server.batch import Batch, check_lines
from edge_llm_server.batch_results import SplitResults, result_paths, size_of
from edge_llm_server.exchange import Log, place_of
from edge_llm_server.files import FileStore, new_id, write_json

if TYPE_CHECKING:
    from edge_llm_batch.lines import Line
    from edge_llm_batch.pool import TaskPool
    from edge_llm_batch.run import BatchRun, Tally
    from edge_llm_batch.task import Task

MAX_OPEN = 32
"""batches of a key that are not done"""
MAX_ENDED = 256
"""of a key, that are remembered"""
TURN_S = 60.0
"""after which a batch lets those of other keys go on"""
PAUSE_S = 30.0
"""after which a batch that could not be written is gone on with"""
_OWNER = "all batches"
"""among those who share an engine; the name of no key"""
_PATIENCE_S = 5.0
_ATTEMPTS = 5
"""engines that may die under a batch before it is given up"""


class Batches:
    """All batches, and the thread that answers them. Every method may be called from any thread but an event loop's: it may
    wait for the disk."""

    def __init__(self, folder: Path, host: EngineHost, log: Log) -> None:
        """Goes on with what was not done when the last server ended.

        Raises `StorageError` for a folder that cannot be used, or that another server uses.
        """
        self._lock_file = _locked(private_dir(folder) / "lock")
        self.files = FileStore(folder)
        self._folder, self._host, self._log = folder, host, log
        self._changed = threading.Condition()
        self._closing = False
        self._batches = {
            batch.id: batch for path in folder.glob("batch_*.json") if (batch := Batch.read(path)) is not None
        }
        for batch in self._batches.values():
            if batch.open:
                self.files.count(batch.owner, batch.id, size_of(result_paths(folder / batch.id)))
        self._stop_running: Callable[[], None] | None = None
        self._running: str | None = None
        self._turns: dict[str, int] = {}
        """of each key, which turn was its last one"""
        self._thread = threading.Thread(target=self._work, name="edge-llm batches", daemon=True)
        self._thread.start()

    def create(self, *, owner: str, model: str, endpoint: str, input_file_id: str, window: str, metadata: Any) -> Batch:
        """Raises `ApiError` for a file that is not there or has too many lines, or too many batches or files."""
        check_lines(self.files.path(self.files.get(input_file_id, owner).id))
        with self._changed:
            waiting = [batch for batch in self._batches.values() if batch.owner == owner and batch.open]
            if len(waiting) >= MAX_OPEN:
                raise ApiError.too_many(f"{MAX_OPEN} batches of this key are not done", 60.0)
            self._forget_old(owner)
            batch = Batch(f"batch_{secrets.token_hex(12)}", owner, endpoint, input_file_id, window, model, metadata)
            self.files.take(owner, batch.id, 0)  # for its results
            try:
                self._store(batch.entered("validating"))
            except OSError:
                self.files.give_back(owner, batch.id)
                raise
            self._changed.notify_all()
            return self._batches[batch.id]

    def _forget_old(self, owner: str) -> None:
        """Leave room for one more of an owner's batches; the lock is held."""
        ended = [batch for batch in self._batches.values() if batch.owner == owner and not batch.open]
        for batch in sorted(ended, key=lambda batch: batch.times["validating"])[: max(0, len(ended) - MAX_ENDED + 1)]:
            (self._folder / f"{batch.id}.json").unlink(missing_ok=True)
            del self._batches[batch.id]

    def get(self, batch_id: str, owner: str) -> Batch:
        """Raises `ApiError` 404, also for a batch of somebody else."""
        with self._changed:
            batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise ApiError(404, f"there is no batch {batch_id[:64]!a}", code="batch_not_found")
        return batch

    def all(self, owner: str) -> list[Batch]:
        """The owner's batches, the newest first."""
        with self._changed:
            own = [batch for batch in self._batches.values() if batch.owner == owner]
        return sorted(own, key=lambda batch: (-batch.times["validating"], batch.id))

    def cancel(self, batch_id: str, owner: str) -> Batch:
        """End a batch; what was answered stays. Does nothing to one that has ended."""
        batch = self.get(batch_id, owner)
        with self._changed:
            batch = self._batches[batch.id]
            if batch.status in ("validating", "in_progress"):
                self._store(batch.entered("cancelling"))
                if self._running == batch.id and self._stop_running is not None:
                    self._stop_running()
                self._changed.notify_all()
            return self._batches[batch.id]

    def close(self) -> None:
        """Stop; the next server goes on with what is not done. Idempotent."""
        with self._changed:
            self._closing = True
            if self._stop_running is not None:
                self._stop_running()
            self._changed.notify_all()
        self._thread.join(_PATIENCE_S)  # it may be waiting for a model to load
        self._lock_file.close()

    # --- the thread ---

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._next() is not None)
                batch = self._next()
                if self._closing or batch is None:
                    return
                self._running = batch.id
                self._turns[batch.owner] = max(self._turns.values(), default=0) + 1
            try:
                self._answer_or_fail(batch)
            except (OSError, StorageError) as error:
                # a full disk, mostly: what was answered is there, and the batch goes on once there is room again
                self._log("batch", id=batch.id, fault=place_of(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, PAUSE_S)
            finally:
                with self._changed:
                    self._running = self._stop_running = None

    def _answer_or_fail(self, batch: Batch) -> None:
        """Raises `OSError` and `StorageError`: not even that it has failed could be written."""
        try:
            self._answer(batch)
        except (OSError, StorageError):
            raise
        except Exception as error:
            self._log("batch", id=batch.id, fault=place_of(error))
            why = str(error) if isinstance(error, EdgeLLMError | ApiError) else "something went wrong"
            self._finish(batch, fault=why)

    def _next(self) -> Batch | None:
        """The oldest batch of the key whose last turn is the longest ago."""
        waiting = [batch for batch in self._batches.values() if batch.open]
        return min(waiting, key=lambda one: (self._turns.get(one.owner, 0), one.times["validating"]), default=None)

    def _answer(self, batch: Batch) -> None:
        """Answer all lines that are not answered yet. Leaves it as it is if the server is closed or its turn is over."""
        from edge_llm_batch.lines import Shard, Survey, read_lines

        if batch.status == "finalizing":
            self._finalize(batch)
            return
        over = False
        job = batch.id.encode("ascii")
        source = self.files.path(self.files.get(batch.input_file_id, batch.owner).id)
        with contextlib.closing(SplitResults(self._folder / batch.id)) as results, contextlib.suppress(_StoppedError):
            with source.open("rb") as stream:
                survey = Survey.of(self._while_wanted(batch, read_lines(stream, job)), Shard(), results.done)
            self._update(batch.id, lambda now: _begun(now, total=survey.lines, **_counts(results)))
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    with self._host.open(batch.model) as client:
                        over = self._run(batch, client, results, source, job)
                    break
                except EngineStoppedError:
                    if attempt == _ATTEMPTS and not self._closing:
                        raise
        with self._changed:
            if self._closing:
                return
            now = self._batches[batch.id]
        if over and now.status != "cancelling" and results.count < now.total:
            return
        self._finish(batch, **_counts(results))

    def _while_wanted(self, batch: Batch, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines. Raises `_StoppedError` once nobody wants them any more."""
        for line in lines:
            if self._closing or self._batches[batch.id].status == "cancelling":
                raise _StoppedError
            yield line

    def _run(self, batch: Batch, client: EngineClient, results: Any, source: Path, job: bytes) -> bool:
        """Whether it ended because its turn was over."""
        from edge_llm_batch.endpoints import Defaults
        from edge_llm_batch.lines import read_lines
        from edge_llm_batch.pool import TaskPool
        from edge_llm_batch.run import BatchRun
        from edge_llm_batch.task import read_tasks

        pool, began, over = TaskPool(), time.monotonic(), False

        def told(_tally: Tally) -> None:
            nonlocal over
            with self._changed:
                self._batches[batch.id] = replace(self._batches[batch.id], **_counts(results))
                others_wait = any(other.open and other.owner != batch.owner for other in self._batches.values())
            if others_wait and not over and time.monotonic() - began >= TURN_S:
                over = True
                pool.empty()  # what was begun comes to its end
            self.files.take(batch.owner, batch.id, results.size)

        with source.open("rb") as stream:
            lines = self._while_wanted(batch, read_lines(stream, job))
            tasks = read_tasks(lines, [batch.endpoint], lambda line: line.number not in results.done)
            run = BatchRun(_Engine(client, batch.owner), results, Defaults(batch.model, None), told)
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(self._until_stopped(batch, run, pool, tasks))
        return over

    async def _until_stopped(self, batch: Batch, run: BatchRun, pool: TaskPool, tasks: Iterable[Task]) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self._changed:
            if self._closing or self._batches[batch.id].status == "cancelling":
                return
            self._stop_running = lambda: _stop(loop, task)
        filling = loop.run_in_executor(None, pool.fill, tasks)
        try:
            await run.run(pool)
        finally:
            with self._changed:
                self._stop_running = None
            pool.close()
            await asyncio.wait([filling])

    def _finish(self, batch: Batch, **known: Any) -> None:
        """What its results will be called is noted first: whatever happens then, they are found and nothing is answered again."""
        for kind, path in self._results(batch):
            if path.exists() and path.stat().st_size:
                known[f"{kind}_file_id"] = new_id()
        self._update(batch.id, lambda now: now.entered("finalizing", **known))
        self._finalize(self._batches[batch.id])

    def _finalize(self, batch: Batch) -> None:
        """Give its results to their owner. Raises `OSError`; then it may be called again."""
        for kind, path in self._results(batch):
            file_id = getattr(batch, f"{kind}_file_id")
            if file_id is None:
                path.unlink(missing_ok=True)
            else:
                filename = f"{batch.id}_{kind}.jsonl"
                self.files.adopt(path, file_id, filename=filename, purpose="batch_output", owner=batch.owner)
        self._update(batch.id, lambda now: now.entered(now.end))
        self.files.give_back(batch.owner, batch.id)

    def _results(self, batch: Batch) -> Iterator[tuple[str, Path]]:
        return zip(("output", "error"), result_paths(self._folder / batch.id), strict=True)

    def _update(self, batch_id: str, change: Callable[[Batch], Batch]) -> None:
        with self._changed:
            self._store(change(self._batches[batch_id]))

    def _store(self, batch: Batch) -> None:
        """Remember, on disk too; the lock is held."""
        write_json(self._folder / f"{batch.id}.json", asdict(batch))
        self._batches[batch.id] = batch


class _StoppedError(Exception):
    """The batch was cancelled, or the server is closed."""


class _Engine:
    """An engine for one key's batch: what it reads is found by nobody else."""

    def __init__(self, client: EngineClient, owner: str) -> None:
        self._client, self._owner = client, owner
        self.info: EngineInfo = client.info

    def submit(self, request: Request) -> Handle:
        return self._client.submit(replace(request, namespace=self._owner, owner=_OWNER))

    def detokenize(self, token_ids: Iterable[int]) -> str:
        return self._client.detokenize(token_ids)


def _locked(path: Path) -> BinaryIO:
    """The file, which no other process has locked. Raises `StorageError`."""
    import fcntl

    if (reason := obstacle(path.parent)) is not None:
        raise StorageError(reason)
    try:
        file = path.open("ab")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StorageError(f"another server answers the batches in {path.parent}") from None
    return file


def _begun(batch: Batch, **known: Any) -> Batch:
    return replace(batch, **known) if batch.status == "cancelling" else batch.entered("in_progress", **known)


def _counts(results: Any) -> dict[str, Any]:
    return {"completed": results.count - results.errors, "failed": results.errors}


def _stop(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended by itself
        loop.call_soon_threadsafe(task.cancel)
