"""What every EngineClient promises, over each transport: a thread, and a process of its own. The model is a tiny one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.client import EngineClient, ThreadClient
from edge_llm.engine.process_client import ProcessClient
from edge_llm.engine.request import Request
from edge_llm.errors import (
    ContextLengthError,
    EngineStoppedError,
    ModelFormatError,
    ParameterError,
    QueueFullError,
)
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished, FinishReason, Message, PromptProgress, TextDelta
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams

WAIT_S = 20.0
"""after which a test that waits for another thread or process has failed"""
LONG = 400
"""tokens of an answer in whose middle something happens"""
CONFIG = EngineConfig(context=512, slots=2, max_chunk=64, mixed_chunk=16, max_queued_requests=2)
TRANSPORTS = ("thread", "process")


def opened(transport: str, folder: Path, config: EngineConfig = CONFIG) -> EngineClient:
    return ProcessClient(folder, config) if transport == "process" else ThreadClient(open_engine(folder, config))


@pytest.fixture(scope="module", params=TRANSPORTS)
def client(request: pytest.FixtureRequest, tiny_folder: Path, kernels: KernelLibrary) -> Iterator[EngineClient]:
    """One that tests share which leave it as it was."""
    made = opened(request.param, tiny_folder)
    yield made
    assert idle(made)
    made.close()


@pytest.fixture(params=TRANSPORTS)
def own(request: pytest.FixtureRequest, tiny_folder: Path, kernels: KernelLibrary) -> Iterator[EngineClient]:
    """One that a test may break."""
    made = opened(request.param, tiny_folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, kernels: KernelLibrary) -> dict[int, tuple[int, ...]]:
    """The answer to `ask(n)` when nobody is in between."""
    core = open_engine(tiny_folder, CONFIG)
    answers = {}
    for n in range(8):
        events: list[object] = []
        core.enqueue(core.prepare(ask(n), events.append))
        while core.has_work:
            core.step()
        answers[n] = events[-1].token_ids
    core.close()
    return answers


def ask(n: int = 0, **params: object) -> Request:
    text = f"Question {n} about Paris. " * (1 + n % 3)
    return Request.completion(text, SamplingParams(**{"max_tokens": 12, "seed": n, "ignore_eos": True, **params}))


def long(**options: object) -> Request:
    params = SamplingParams(max_tokens=LONG, temperature=0, ignore_eos=True)
    return Request.completion("Once upon a time", params, **options)


def idle(client: EngineClient) -> bool:
    """Whether all requests end by themselves."""
    return happens(lambda: client.statistics().num_requests_running + client.statistics().num_requests_waiting == 0)


def happens(condition: Callable[[], bool]) -> bool:
    changed = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return True
        changed.wait(0.01)
    return False


def kill(client: EngineClient) -> None:
    """The worst that can happen to an engine of this kind."""
    if isinstance(client, ProcessClient):
        os.kill(client._supervisor._child.pid, signal.SIGKILL)
    else:
        client._core.session.forward = None  # whose call is a TypeError


def test_an_engine_says_what_it_is(client: EngineClient, tiny_folder: Path) -> None:
    core = open_engine(tiny_folder, CONFIG)
    assert client.info == core.info
    assert client.info.context == 512
    core.close()


def test_an_answer_is_the_one_of_the_engine_alone(client: EngineClient, expected: dict[int, tuple[int, ...]]) -> None:
    events = list(client.submit(ask(2)))
    assert isinstance(events[0], PromptProgress)
    assert any(isinstance(event, TextDelta) for event in events)
    assert [type(event) for event in events].count(Finished) == 1
    assert events[-1].token_ids == expected[2]
    assert events[-1].timings.ttft_s > 0


def test_every_part_of_a_request_arrives(client: EngineClient) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, logprobs=True, top_logprobs=2, logit_bias={5: -100.0})
    form = Grammar.regex("[ab]{3}")
    handle = client.submit(Request.chat([Message.user("é🗼\0")], params, response_format=form, namespace="me"))
    events = list(handle)
    assert len("".join(event.text for event in events if isinstance(event, TextDelta))) == 3
    infos = [info for event in events if isinstance(event, TextDelta) for info in event.tokens]
    assert all(len(info.alternatives) == 2 and isinstance(info.chosen.data, bytes) for info in infos)
    assert infos


def test_vectors_and_labels_arrive_bit_for_bit(client: EngineClient, tiny_folder: Path) -> None:
    requests = [Request.completion("a text", embedding="mean"), Request.completion("a text", choices=("one", "two"))]
    core, results = open_engine(tiny_folder, CONFIG), []
    for request in requests:
        core.enqueue(core.prepare(request, results.append))
        while core.has_work:
            core.step()
    core.close()
    vector, labels = (event for event in results if isinstance(event, Finished))
    assert client.submit(requests[0]).result().embedding == vector.embedding
    assert client.submit(requests[1]).result().choices == labels.choices
    assert len(vector.embedding) > len(labels.choices) == 2


def test_what_is_wrong_is_said_at_once(client: EngineClient) -> None:
    before = client.statistics().num_steps
    with pytest.raises(ContextLengthError, match="2000 tokens") as caught:
        client.submit(Request(token_ids=(5,) * 2000))
    assert (caught.value.prompt_tokens, caught.value.context) == (2000, 512)
    with pytest.raises(ParameterError, match="empty") as empty:
        client.submit(Request.completion(""))
    assert empty.value.hint == "give at least one token of text"
    with pytest.raises(ParameterError, match="cannot be used"):
        client.submit(Request.completion("x", response_format=Grammar.regex("(")))
    for wrong in ((10**6,), (True,), (1.5,)):
        with pytest.raises(ParameterError):
            client.submit(Request(token_ids=wrong))
    assert client.statistics().num_steps == before


def test_prompts_are_tokenised(client: EngineClient) -> None:
    chat = Request.chat([Message.user("hello")])
    ids = client.tokenize(chat)
    assert client.detokenize(ids) == client.detokenize(tuple(ids))
    assert "hello" in client.detokenize(ids)
    assert len(client.tokenize(Request.completion("hello " * 1000))) > client.info.context
    with pytest.raises(ParameterError, match="token ids"):
        client.detokenize([client.info.vocab])


def test_a_full_queue_refuses_and_says_when_to_come_back(client: EngineClient) -> None:
    """B50."""
    taken = [client.submit(long()) for _ in range(4)]
    refusals = client.statistics().admission_rejections
    with pytest.raises(QueueFullError) as caught:
        client.submit(long())
    assert caught.value.retry_after_s >= 1
    assert client.statistics().admission_rejections == refusals + 1
    for handle in taken:
        handle.cancel()
        assert list(handle)[-1].reason is FinishReason.CANCELLED


def test_cancel_keeps_what_was_said(client: EngineClient) -> None:
    handle = client.submit(long())
    seen = [next(event for event in handle if isinstance(event, TextDelta))]
    handle.cancel()
    *rest, last = handle
    text = "".join(event.text for event in (*seen, *rest) if isinstance(event, TextDelta))
    assert last.reason is FinishReason.CANCELLED
    assert 0 < len(last.token_ids) < LONG
    assert text
    handle.cancel()


def test_cancel_in_the_queue(client: EngineClient) -> None:
    running = [client.submit(long()) for _ in range(2)]
    waiting = client.submit(long())
    waiting.cancel()
    assert list(waiting)[-1].token_ids == ()
    for handle in running:
        handle.cancel()
        assert list(handle)[-1].reason is FinishReason.CANCELLED


def test_a_handle_that_nobody_holds_cancels(client: EngineClient) -> None:
    handle = client.submit(long())
    next(handle)
    del handle
    gc.collect()
    assert idle(client)
    assert client.statistics().request_success["cancelled"] >= 1


def test_many_threads_ask_and_each_gets_its_own(client: EngineClient, expected: dict[int, tuple[int, ...]]) -> None:
    def answer(n: int) -> tuple[int, ...]:
        while True:
            try:
                handle = client.submit(ask(n))
            except QueueFullError:
                threading.Event().wait(0.01)
                continue
            handle.text()
            return handle.finished.token_ids

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(answer, [*range(8)] * 3)) == [expected[n] for n in range(8)] * 3


def test_asyncio_reads_several_side_by_side(client: EngineClient, expected: dict[int, tuple[int, ...]]) -> None:
    async def one(n: int) -> tuple[int, ...]:
        handle = client.submit(ask(n))
        events = [event async for event in handle]
        assert handle.finished is events[-1]
        return events[-1].token_ids

    async def all_of_them() -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*map(one, range(4))))

    assert asyncio.run(all_of_them()) == [expected[n] for n in range(4)]


def test_close_waits_for_answers_if_it_shall(own: EngineClient, expected: dict[int, tuple[int, ...]]) -> None:
    handles = [own.submit(ask(n)) for n in range(4)]
    own.close(drain=True)
    own.close()
    assert [list(handle)[-1].token_ids for handle in handles] == [expected[n] for n in range(4)]
    assert own.statistics().request_success == {"length": 4}
    with pytest.raises(EngineStoppedError, match="closed"):
        own.submit(ask())


def test_close_ends_answers(own: EngineClient) -> None:
    handles = [own.submit(long()) for _ in range(3)]
    next(handles[0])
    own.close()
    assert [list(handle)[-1].reason for handle in handles] == [FinishReason.CANCELLED] * 3
    assert own.info.slots == 2


def test_a_drain_can_be_cut_short(own: EngineClient) -> None:
    handles = [own.submit(long()) for _ in range(4)]
    draining = threading.Thread(target=lambda: own.close(drain=True))
    draining.start()
    next(handles[0])
    own.close()
    draining.join(WAIT_S)
    assert not draining.is_alive()
    assert FinishReason.CANCELLED in [list(handle)[-1].reason for handle in handles]


def test_a_dead_engine_reaches_every_reader(own: EngineClient) -> None:
    """One that reads, one that waits in asyncio, one in the queue."""
    handles = [own.submit(long()) for _ in range(4)]
    next(handles[0])

    async def read() -> None:
        kill(own)
        async for _ in handles[1]:
            pass

    with pytest.raises(EngineStoppedError):
        asyncio.run(read())
    for handle in (handles[0], *handles[2:]):
        with pytest.raises(EngineStoppedError):
            handle.text()
        assert list(handle) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_that_nobody_holds_ends_its_engine(transport: str, tiny_folder: Path, kernels: KernelLibrary) -> None:
    client = opened(transport, tiny_folder)
    runs = (client._supervisor if isinstance(client, ProcessClient) else client._worker)._thread.is_alive
    handle = client.submit(ask())
    del client
    gc.collect()
    assert runs()  # for the handle's sake
    handle.text()
    del handle
    gc.collect()
    assert happens(lambda: not runs())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_it_has_no_engine(client: EngineClient) -> None:
    child = os.fork()
    if child == 0:
        try:
            client.submit(ask())
        except EngineStoppedError:
            client.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.submit(ask()).text() is not None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_that_cannot_be_loaded_is_named(transport: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no readable manifest") as caught:
        opened(transport, tmp_path)
    assert caught.value.hint == "import the model again"
