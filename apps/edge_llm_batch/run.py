"""BatchRun: tasks to an engine, many at a time, and their results to where they go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edge_llm_server.answer import Answer
from edge_llm_server.api_error import ApiError
from edge_llm_server.chat_shapes import new_id
from edge_llm_server.fields import refusal

from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError, EngineStoppedError, QueueFullError
from edge_llm.messages import Finished, FinishReason
from edge_llm_batch.endpoints import Answering, Defaults, asked
from edge_llm_batch.pool import TaskPool
from edge_llm_batch.results import Results
from edge_llm_batch.task import Task

T = TypeVar("T")
_NAMES, _NAMES_OF_A_RESPONSE = ("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")


@dataclass(slots=True)
class Tally:
    """What a run has done so far, in lines and tokens."""

    answered: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, result: dict[str, Any]) -> None:
        response = result["response"]
        if response is None or response["status_code"] != 200:
            self.errors += 1
            return
        self.answered += 1
        usage = response["body"]["usage"]
        prompt, completion = _NAMES_OF_A_RESPONSE if "input_tokens" in usage else _NAMES
        self.prompt_tokens += usage[prompt]
        self.cached_tokens += usage.get(f"{prompt}_details", {}).get("cached_tokens", 0)
        self.completion_tokens += usage.get(completion, 0)  # of embeddings there are none


def fault_result(task: Task) -> dict[str, Any]:
    """The result of a line that is no request."""
    assert task.fault is not None
    error = {"code": task.fault.code, "message": task.fault.message, "line": task.line.number}
    return {"id": str(task.line), "custom_id": task.custom_id, "response": None, "error": error}


class BatchRun:
    """Answers each task once, with a line for its result. Used by one event loop."""

    def __init__(
        self, engine: Answering, results: Results, defaults: Defaults, told: Callable[[Tally], None] | None = None
    ) -> None:
        """`told` hears after each result what was done so far."""
        self._engine, self._results, self._defaults, self._told = engine, results, defaults, told
        self._width = 2 * engine.info.slots  # one that waits for each that runs: no slot is ever without work
        self._room = asyncio.Semaphore(self._width)
        self.tally = Tally()

    async def run(self, pool: TaskPool) -> None:
        """Answer all tasks of the pool. Raises what ends all of them: `EngineStoppedError`, what the pool and the results
        raise; and if it is cancelled, what runs is ended without a result."""
        await _together([self._work(pool) for _ in range(self._width)])

    async def _work(self, pool: TaskPool) -> None:
        while (task := await pool.get()) is not None:
            result = await self._result(task)
            self._results.write(result)
            self.tally.add(result)
            if self._told is not None:
                self._told(self.tally)

    async def _result(self, task: Task) -> dict[str, Any]:
        if task.fault is not None:
            return fault_result(task)
        try:
            status, body = 200, await self._reply(task)
        except ApiError as error:
            status, body = error.status, error.body
        except EngineStoppedError:
            raise
        except Exception as error:  # a fault of ours: one line must not stop the others, now and at each new start
            status, body = 500, ApiError(500, f"the request failed: {type(error).__name__}").body
        response = {"status_code": status, "request_id": new_id("req_"), "body": body}
        return {"id": str(task.line), "custom_id": task.custom_id, "response": response, "error": None}

    async def _reply(self, task: Task) -> dict[str, Any]:
        """The reply's body. Raises `ApiError` for what is wrong with this one task."""
        wanted = asked(task.url, task.body, self._engine, self._defaults)
        try:
            return wanted.reply(await _together([self._answer(request) for request in wanted.requests]))
        except EngineStoppedError:
            raise
        except EdgeLLMError as error:
            raise refusal(error, wanted.param, wanted.names) from None

    async def _answer(self, request: Request) -> Answer:
        answer = Answer()
        async with self._room:
            while True:
                try:
                    handle = self._engine.submit(request)
                    break
                except QueueFullError as error:  # long prompts, or others that use this engine
                    await asyncio.sleep(error.retry_after_s)
            try:
                async for event in handle:
                    answer.add(event)
                    if isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
                        raise EngineStoppedError("the engine was closed before the batch was done")
            finally:
                handle.cancel()
        return answer


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
