"""ThreadClient: requests from any thread, each answered once, whatever happens to the engine or to its readers."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_llm.engine.client import ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import Request
from edge_llm.errors import ContextLengthError, EngineStoppedError, ParameterError, QueueFullError, TemplateError
from edge_llm.messages import Finished, FinishReason, Message, TextDelta
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import PARIS, START, VOCAB, byte_ids, make_core, says

WAIT = 20.0
"""seconds after which a test that waits for a thread has failed"""


class Gate:
    """Holds the engine's thread before a step until it is opened."""

    def __init__(self, core: EngineCore, step: int = 0) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._core, self._step = core, step
        core.session.before_step = self._before

    def _before(self, _: object) -> None:
        if len(self._core.session.steps) == self._step + 1:
            self.reached.set()
            assert self.open.wait(WAIT)

    def __enter__(self) -> Gate:
        assert self.reached.wait(WAIT)
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()


Start = Callable[..., tuple[ThreadClient, EngineCore]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts clients, and closes them at the end with their books checked."""
    started: list[ThreadClient] = []

    def make(*arguments: object, **options: object) -> tuple[ThreadClient, EngineCore]:
        core = make_core(*arguments, **options)
        client = ThreadClient(core)
        started.append(client)
        return client, core

    yield make
    for client in started:
        client.close()
        assert not client._worker._thread.is_alive()


def prompt(length: int = 1, **params: object) -> Request:
    ids = (*byte_ids("x") * (length - 1), START)
    return Request(token_ids=ids, params=SamplingParams(**{"temperature": 0.0, **params}))


def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another thread is about to do."""
    changed = threading.Event()
    for _ in range(int(WAIT / 0.005)):
        if condition():
            return
        changed.wait(0.005)
    raise AssertionError("it never happened")


def test_an_answer_streams_and_collects(start: Start) -> None:
    client, _ = start(says(PARIS))
    assert client.submit(Request.chat([Message.user("hello")])).text() == PARIS
    events = list(client.submit(prompt()))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == PARIS
    assert sum(isinstance(event, Finished) for event in events) == 1
    assert isinstance(events[-1], Finished)


def test_what_is_wrong_with_a_request_raises_at_once(start: Start) -> None:
    client, core = start(context=50)
    with pytest.raises(ContextLengthError):
        client.submit(prompt(50))
    with pytest.raises(ParameterError):
        client.submit(Request.completion(""))
    assert not core.has_work
    assert core.session.steps == []


def test_the_engine_says_what_it_is(start: Start) -> None:
    client, core = start(context=99, slots=3)
    info = client.info
    assert (info.name, info.context, info.slots, info.vocab, info.chats) == ("fake", 99, 3, VOCAB, True)
    assert (info.layout, info.kv_type, info.weights_bytes) == ("ring", "int8", 1)
    assert info.tokenizer_digest == core.intake.tokenizer.digest


def test_prompts_are_tokenised_without_running_anything(start: Start) -> None:
    client, core = start(context=20)
    chat = Request.chat([Message.user("hello world, this is long")])
    ids = client.tokenize(chat)
    assert ids == core.intake.prompt(chat)[0]
    assert len(ids) > 20
    assert client.tokenize(Request.completion("")) == []
    assert client.detokenize(ids) == "<|im_start|>user\nhello world, this is long<|im_end|>\n<|im_start|>assistant\n"
    core.intake.template = None
    with pytest.raises(TemplateError):
        client.tokenize(chat)
    assert core.session.steps == []


def test_only_ids_of_the_vocabulary_have_a_text(start: Start) -> None:
    client, _ = start()
    assert client.detokenize(byte_ids("é")[:1]) == "\ufffd"
    assert client.detokenize([]) == ""
    for wrong in (-1, VOCAB, True, 1.0, "1"):
        with pytest.raises(ParameterError, match=f"0 to {VOCAB - 1}"):
            client.detokenize([wrong])


def test_many_threads_submit(start: Start) -> None:
    client, core = start(slots=3, max_queued_requests=100)
    alone = {n: list(client.submit(prompt(n, max_tokens=8)))[-1].token_ids for n in range(1, 9)}

    def ask(n: int) -> bool:
        handle = client.submit(prompt(n, max_tokens=8))
        handle.text()
        return handle.finished is not None and handle.finished.token_ids == alone[n]

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(ask, [1 + i % 8 for i in range(60)]))
    assert all(results)
    assert not core.has_work


def test_a_full_queue_refuses_at_once(start: Start) -> None:
    """B50."""
    client, core = start(says("yes"), slots=1, max_queued_requests=1)
    gate = Gate(core)
    taken = [client.submit(prompt())]
    with gate:
        taken.append(client.submit(prompt()))
        for _ in range(4):
            with pytest.raises(QueueFullError) as caught:
                client.submit(prompt())
            assert caught.value.retry_after_s >= 1
    assert [handle.text() for handle in taken] == ["yes", "yes"]


@pytest.mark.parametrize("step", [0, 3])
def test_cancel_from_another_thread(start: Start, step: int) -> None:
    """In the first prompt chunk, and while it is answered; the one that waits behind goes on."""
    client, core = start(says("abcdefghijklmnop"), slots=1, max_rows=16)
    gate = Gate(core, step)
    handle, waiting = client.submit(prompt(20)), client.submit(prompt())
    with gate:
        handle.cancel()
    events = list(handle)
    assert events[-1].reason is FinishReason.CANCELLED
    assert len(events[-1].token_ids) == max(0, step)
    assert waiting.text() == "abcdefghijklmnop"


def test_cancel_in_the_queue(start: Start) -> None:
    client, core = start(says("abc"), slots=1)
    gate = Gate(core)
    running, waiting = client.submit(prompt()), client.submit(prompt())
    with gate:
        waiting.cancel()
    assert list(waiting)[-1].reason is FinishReason.CANCELLED
    assert running.text() == "abc"


def test_a_dropped_handle_frees_its_slot(start: Start) -> None:
    client, core = start(slots=1)
    handle = client.submit(prompt(max_tokens=200))
    next(handle)
    del handle
    until(lambda: not core.has_work)
    assert core.free_slots == 1
    for _ in client.submit(prompt(max_tokens=200)):
        break  # the temporary handle goes with the loop
    until(lambda: not core.has_work)
    assert core.free_slots == 1


def test_asyncio_reads_several_answers_side_by_side(start: Start) -> None:
    client, _ = start(says(PARIS), slots=2)

    async def read() -> list[str]:
        async def one() -> str:
            handle = client.submit(prompt())
            return "".join([event.text async for event in handle if isinstance(event, TextDelta)])

        return list(await asyncio.gather(one(), one(), one()))

    assert asyncio.run(read()) == [PARIS] * 3


def test_a_dead_engine_reaches_every_reader(start: Start) -> None:
    client, core = start(slots=1)
    gate = Gate(core, step=2)
    handles = [client.submit(prompt(max_tokens=50)) for _ in range(3)]

    def die(_: object) -> None:
        raise MemoryError("no room")

    with gate:
        core.session.before_step = die
    for handle in handles:
        with pytest.raises(EngineStoppedError, match="no room"):
            handle.text()
    client._worker._thread.join(WAIT)
    with pytest.raises(EngineStoppedError, match="no room"):
        client.submit(prompt())
    assert core.session.closed


def test_close_cancels_what_runs(start: Start) -> None:
    client, core = start(slots=1)
    gate = Gate(core, step=2)
    handles = [client.submit(prompt(max_tokens=200)) for _ in range(2)]
    with gate:
        closing = threading.Thread(target=client.close)
        closing.start()
        until(lambda: client._worker._closing)
    closing.join(WAIT)
    assert [list(handle)[-1].reason for handle in handles] == [FinishReason.CANCELLED] * 2
    assert core.session.closed
    with pytest.raises(EngineStoppedError, match="closed"):
        client.submit(prompt())


def test_close_can_wait_for_what_runs(start: Start) -> None:
    client, core = start(says(PARIS), slots=1)
    handles = [client.submit(prompt()) for _ in range(3)]
    client.close(drain=True)
    client.close()
    assert [handle.text() for handle in handles] == [PARIS] * 3
    assert core.session.closed


def test_a_drain_can_be_cut_short(start: Start) -> None:
    client, core = start(slots=1)
    gate = Gate(core, step=1)
    handle = client.submit(prompt(max_tokens=200))
    with gate:
        draining = threading.Thread(target=lambda: client.close(drain=True))
        draining.start()
        until(lambda: client._worker._draining)
        with pytest.raises(EngineStoppedError):
            client.submit(prompt())
        closing = threading.Thread(target=client.close)
        closing.start()
        until(lambda: client._worker._closing)
    for thread in (draining, closing):
        thread.join(WAIT)
    assert list(handle)[-1].reason is FinishReason.CANCELLED


def test_a_client_that_is_dropped_ends_its_thread() -> None:
    core = make_core()
    client = ThreadClient(core)
    thread = client._worker._thread
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    thread.join(WAIT)
    assert not thread.is_alive()
    assert core.session.closed


def test_a_handle_keeps_its_client() -> None:
    handle = ThreadClient(make_core(says(PARIS))).submit(prompt())
    gc.collect()
    assert handle.text() == PARIS


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see a thread's wake-ups")
def test_an_idle_engine_sleeps(start: Start) -> None:
    """B35: no polling. Its thread is not scheduled even once while nobody asks anything."""
    client, _ = start(says("yes"))
    assert client.submit(prompt()).text() == "yes"
    status = Path(f"/proc/self/task/{client._worker._thread.native_id}/status")

    def switches() -> list[str]:
        return [line for line in status.read_text().splitlines() if "ctxt_switches" in line]

    until(lambda: "State:\tS" in status.read_text())
    before = switches()
    threading.Event().wait(0.3)
    assert switches() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_it_has_no_engine(start: Start) -> None:
    client, _ = start(says("yes"))
    assert client.submit(prompt()).text() == "yes"
    child = os.fork()
    if child == 0:
        try:
            client.submit(prompt())
        except EngineStoppedError:
            client.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
