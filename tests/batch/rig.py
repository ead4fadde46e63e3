"""Lines of a batch, and runs of them over an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from edge_llm_batch.endpoints import ENDPOINTS, Answering, Defaults
from edge_llm_batch.lines import LineId, read_lines
from edge_llm_batch.pool import TaskPool
from edge_llm_batch.run import BatchRun
from edge_llm_batch.task import Task, read_tasks

from edge_llm.engine.client import ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.engine.engine import Engine

CHAT, COMPLETION, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"


def chat(custom_id: str, text: str = "Hi", **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def completion(custom_id: str, prompt: Any = "Hello", **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETION, "body": body}


def response(custom_id: str, given: Any = "Hello", **body: Any) -> dict[str, Any]:
    body = {"input": given, "max_output_tokens": 6, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": RESPONSES, "body": body}


def embeddings(custom_id: str, given: Any = "Hello", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": EMBEDDINGS, "body": {"input": given, **body}}


def jsonl(lines: Iterable[object]) -> bytes:
    """Lines of a file; texts and bytes as they are."""
    encoded = (
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    )
    return b"".join(line + b"\n" for line in encoded)


def tasks_of(lines: Iterable[object]) -> Iterator[Task]:
    return read_tasks(read_lines(io.BytesIO(jsonl(lines)), b"job"), ENDPOINTS, lambda line: True)


class Kept:
    """Results in memory, in the order in which they came."""

    def __init__(self) -> None:
        self.done: dict[int, LineId] = {}
        self.errors = 0
        self.lines: list[dict[str, Any]] = []

    def write(self, result: dict[str, Any]) -> None:
        self.lines.append(json.loads(json.dumps(result)))

    def close(self) -> None: ...

    def in_order(self) -> list[dict[str, Any]]:
        """As their lines stand in the input."""
        return sorted(self.lines, key=lambda line: line["id"])


def run_batch(engine: Answering, lines: Iterable[object], kept: Kept | None = None, **defaults: Any) -> BatchRun:
    """A run that is over."""

    async def work() -> BatchRun:
        run = BatchRun(engine, kept or Kept(), Defaults(**{"model": "fake", "max_tokens": 8, **defaults}))
        pool = TaskPool()
        reader = threading.Thread(target=pool.fill, args=(list(tasks_of(lines)),))
        reader.start()
        try:
            await run.run(pool)
        finally:
            pool.close()
            reader.join()
        return run

    return asyncio.run(work())


@contextmanager
def engine_of(core: EngineCore) -> Iterator[Engine]:
    with closing(Engine(ThreadClient(core))) as engine:
        yield engine


def results_of(core: EngineCore, lines: Iterable[object], **defaults: Any) -> list[dict[str, Any]]:
    """The results of these lines, in their order."""
    kept = Kept()
    with engine_of(core) as engine:
        run_batch(engine, lines, kept, **defaults)
    return kept.in_order()
