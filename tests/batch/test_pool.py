"""TaskPool: bounded, in the order of keys, and never a reason to wait for ever."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from edge_llm_batch.lines import LineId
from edge_llm_batch.pool import TaskPool
from edge_llm_batch.task import Task

WAIT = 20.0


def task(key: str, number: int = 1, size: int = 1) -> Task:
    return Task(LineId(number, 0), size, key=key)


def emptied(pool: TaskPool) -> str:
    async def empty() -> str:
        keys = ""
        while (one := await pool.get()) is not None:
            keys += one.key
        return keys

    return asyncio.run(asyncio.wait_for(empty(), WAIT))


def test_keys_go_up_and_begin_again() -> None:
    pool = TaskPool()
    pool.fill(task(key) for key in "bdac")
    assert emptied(pool) == "abcd"

    async def in_between() -> str:
        pool = TaskPool(max_tasks=3)
        reader = threading.Thread(target=pool.fill, args=([task(key) for key in "cdabebz"],))
        reader.start()
        keys = ""
        while (one := await pool.get()) is not None:
            keys += one.key
            until = time.monotonic() + WAIT
            while len(pool._tasks) < 3 and not pool._ended and time.monotonic() < until:
                await asyncio.sleep(0.001)
        reader.join()
        return keys

    keys = asyncio.run(in_between())
    assert sorted(keys) == sorted("cdabebz")
    assert keys.index("e") < keys.rindex("b") or keys.startswith("ab"), "it never goes back before the end"


def test_equal_keys_keep_the_order_of_their_lines() -> None:
    pool = TaskPool()
    pool.fill([task("a", 2), task("a", 1), task("a", 3)])

    async def numbers() -> list[int]:
        return [one.line.number for _ in range(3) if (one := await pool.get()) is not None]

    assert asyncio.run(numbers()) == [1, 2, 3]


@pytest.mark.parametrize(("limits", "most"), [({"max_tasks": 4}, 4), ({"max_bytes": 10}, 2)])
def test_no_more_is_read_than_may_be_held(limits: dict[str, int], most: int) -> None:
    pool, read = TaskPool(**limits), []

    def tasks():
        for number in range(1, 101):
            read.append(number)
            yield task("a", number, size=5)

    reader = threading.Thread(target=pool.fill, args=(tasks(),))
    reader.start()

    async def check() -> int:
        taken = 0
        while await pool.get() is not None:
            taken += 1
            assert len(read) <= taken + most + 1, "one more may be on its way"
        return taken

    assert asyncio.run(asyncio.wait_for(check(), WAIT)) == 100
    reader.join(WAIT)
    assert not reader.is_alive()


def test_a_task_larger_than_the_pool_still_passes() -> None:
    pool = TaskPool(max_bytes=10)
    reader = threading.Thread(target=pool.fill, args=([task("a", 1, 50), task("b", 2, 50)],))
    reader.start()
    assert emptied(pool) == "ab"
    reader.join(WAIT)


def test_who_waits_hears_of_tasks_of_the_end_and_of_failures() -> None:
    async def waited(pool: TaskPool, later) -> list[object]:
        getting = [asyncio.create_task(pool.get()) for _ in range(3)]
        await asyncio.sleep(0)
        reader = threading.Thread(target=later)
        reader.start()
        async with asyncio.timeout(WAIT):
            found = await asyncio.gather(*getting, return_exceptions=True)
        reader.join()
        return [one.key if isinstance(one, Task) else one for one in found]

    pool = TaskPool()
    assert asyncio.run(waited(pool, lambda: pool.fill([task("a")]))) == ["a", None, None]
    failing, error = TaskPool(), OSError("the disk is gone")

    def tasks():
        yield task("a")
        raise error

    assert asyncio.run(waited(failing, lambda: failing.fill(tasks()))) == ["a", error, error]


def test_closing_ends_who_fills_it() -> None:
    pool = TaskPool(max_tasks=1)
    reader = threading.Thread(target=pool.fill, args=([task("a"), task("b"), task("c")],))
    reader.start()
    pool.close()
    reader.join(WAIT)
    assert not reader.is_alive()


def test_a_pool_that_is_emptied_gives_out_nothing_more() -> None:
    pool = TaskPool(max_tasks=2)
    reader = threading.Thread(target=pool.fill, args=([task("a"), task("b"), task("c"), task("d")],))
    reader.start()

    async def first() -> Task | None:
        return await pool.get()

    found = asyncio.run(first())
    assert found is not None
    assert found.key == "a"
    pool.empty()
    reader.join(WAIT)
    assert not reader.is_alive()
    assert emptied(pool) == ""
