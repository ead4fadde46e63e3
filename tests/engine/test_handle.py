"""Handle and Mailbox: one reader, in a thread or in an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edge_llm.engine.handle import Handle, Mailbox, Wakes
from edge_llm.errors import GenerationError
from edge_llm.messages import Finished, FinishReason, TextDelta, Timings, Usage

END = Finished(FinishReason.STOP, Usage(1, 2), Timings(0.0, 0.1, 0.2), seed=1)


def filled(*items: object) -> Mailbox:
    mailbox = Mailbox()
    for item in items:
        mailbox.put(item)
    return mailbox


def test_events_come_in_order_and_end() -> None:
    handle = Handle(filled(TextDelta("a"), TextDelta("b"), END), lambda: None)
    assert list(handle) == [TextDelta("a"), TextDelta("b"), END]
    assert handle.finished == END
    assert list(handle) == []


def test_text_collects_the_rest() -> None:
    handle = Handle(filled(TextDelta("a"), TextDelta("b"), TextDelta("c"), END), lambda: None)
    assert next(handle) == TextDelta("a")
    assert handle.text() == "bc"
    assert handle.text() == ""


def test_an_error_is_raised_once_and_ends() -> None:
    handle = Handle(filled(TextDelta("a"), GenerationError("no")), lambda: None)
    with pytest.raises(GenerationError, match="no"):
        handle.text()
    assert list(handle) == []
    assert handle.finished is None


def test_a_handle_that_is_dropped_cancels() -> None:
    cancelled = []
    handle = Handle(filled(TextDelta("a"), END), lambda: cancelled.append(1))
    next(handle)
    del handle
    assert cancelled == [1]


def test_a_handle_that_was_read_to_its_end_does_not() -> None:
    cancelled = []
    owner = threading.Event()
    handle = Handle(filled(END), lambda: cancelled.append(1), owner=owner)
    list(handle)
    handle.cancel()
    handle.close()
    assert handle._owner is None
    del handle
    assert cancelled == []


def test_close_cancels() -> None:
    cancelled = []
    handle = Handle(filled(END), lambda: cancelled.append(1))
    handle.close()
    assert cancelled == [1]
    list(handle)


def test_a_thread_waits_for_events() -> None:
    mailbox = Mailbox()
    texts = []
    reader = threading.Thread(target=lambda: texts.append(Handle(mailbox, lambda: None).text()))
    reader.start()
    for item in (TextDelta("a"), TextDelta("b"), END):
        mailbox.put(item)
    reader.join(10)
    assert texts == ["ab"]


def test_a_task_waits_for_events() -> None:
    mailbox = Mailbox()

    async def read() -> list[object]:
        waiting = asyncio.Event()

        async def reader() -> list[object]:
            waiting.set()
            return [event async for event in Handle(mailbox, lambda: None)]

        task = asyncio.create_task(reader())
        await waiting.wait()
        sender = threading.Thread(target=lambda: [mailbox.put(item) for item in (TextDelta("a"), END)])
        sender.start()
        try:
            return await task
        finally:
            sender.join()

    assert asyncio.run(read()) == [TextDelta("a"), END]


def test_a_cancelled_wait_loses_nothing() -> None:
    mailbox = Mailbox()

    async def read() -> list[object]:
        handle = Handle(mailbox, lambda: None)
        waiting = asyncio.ensure_future(handle.__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        mailbox.put(TextDelta("a"))
        mailbox.put(END)
        return [event async for event in handle]

    assert asyncio.run(read()) == [TextDelta("a"), END]


def test_a_closed_loop_does_not_hurt_the_engine() -> None:
    mailbox = Mailbox()

    async def give_up() -> None:
        waiting = asyncio.ensure_future(mailbox.get_async())
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(give_up())
    mailbox.put(TextDelta("a"))
    assert mailbox.get() == TextDelta("a")


def test_an_error_reaches_a_task() -> None:
    async def read() -> None:
        handle = Handle(filled(GenerationError("no")), lambda: None)
        with pytest.raises(GenerationError):
            await handle.__anext__()
        with pytest.raises(StopAsyncIteration):
            await handle.__anext__()

    asyncio.run(read())
    assert True


def test_result_reads_to_the_end() -> None:
    handle = Handle(filled(TextDelta("a"), END), lambda: None)
    assert handle.result() is END
    assert handle.result() is END
    with pytest.raises(GenerationError):
        Handle(filled(GenerationError("no")), lambda: None).result()


def test_some_takes_what_is_there() -> None:
    async def read() -> None:
        handle = Handle(filled(TextDelta("a"), TextDelta("b"), TextDelta("c"), END), lambda: None)
        assert await handle.some(2) == [TextDelta("a"), TextDelta("b")]
        assert await handle.some(9) == [TextDelta("c"), END]
        assert handle.finished == END
        assert await handle.some(9) == []

    asyncio.run(read())


def test_some_gives_what_came_before_an_error() -> None:
    async def read() -> None:
        handle = Handle(filled(TextDelta("a"), TextDelta("b"), GenerationError("no")), lambda: None)
        assert await handle.some(9) == [TextDelta("a"), TextDelta("b")]
        with pytest.raises(GenerationError, match="no"):
            await handle.some(9)
        assert await handle.some(9) == []
        with pytest.raises(GenerationError, match="at once"):
            await Handle(filled(GenerationError("at once")), lambda: None).some(9)

    asyncio.run(read())


def test_tasks_of_a_loop_are_woken_together() -> None:
    mailboxes = [Mailbox() for _ in range(5)]
    woken: list[object] = []

    async def read() -> None:
        loop = asyncio.get_running_loop()
        waiting = [asyncio.create_task(mailbox.get_async()) for mailbox in mailboxes]
        await asyncio.sleep(0)
        call, loop.call_soon_threadsafe = loop.call_soon_threadsafe, lambda *rest: (woken.append(rest), call(*rest))
        wakes = Wakes()
        for mailbox in mailboxes:
            mailbox.put(END, wakes)
        assert not woken
        wakes.send()
        assert await asyncio.gather(*waiting) == [[END]] * 5
        del loop.call_soon_threadsafe
        assert len(woken) == 1

    asyncio.run(read())
