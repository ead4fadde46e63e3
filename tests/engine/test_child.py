"""The child's side of the conversation, on a thread instead of in a process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine import child
from edge_llm.engine.channel import Channel
from edge_llm.engine.codec import WireError
from edge_llm.engine.core import EngineCore
from edge_llm.engine.protocol import (
    Cancel,
    Close,
    Closed,
    Detokenize,
    Failed,
    Happened,
    Loading,
    Measure,
    Open,
    Ready,
    Reply,
    Submit,
    Tokenize,
)
from edge_llm.engine.request import Request
from edge_llm.errors import GenerationError, ModelFormatError, ParameterError
from edge_llm.messages import Finished, FinishReason, TextDelta
from edge_llm.metrics import Statistics
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import START, byte_ids, make_core, says
from tests.engine.test_client import Gate
from tests.engine.test_client_contract import WAIT_S


class Conversation:
    """The parent's end of a served engine."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        def opened(folder: Path, config: EngineConfig, progress: Callable[[str, int, int], None]) -> EngineCore:
            progress("kernels", 1, 2)
            return core

        monkeypatch.setattr(child, "open_engine", opened)
        self.core = core
        ours, theirs = socket.socketpair()
        ours.settimeout(WAIT_S)
        self.channel, self.served = Channel(ours), Channel(theirs)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        self._unread: list[Any] = []

    def _serve(self) -> None:
        try:
            child._serve(self.served)
        except BaseException as error:
            self.error = error

    def say(self, *values: object) -> None:
        for value in values:
            self.channel.send(value)

    def hear(self) -> Any:
        self._unread = self._unread or self.channel.receive()
        return self._unread.pop(0) if self._unread else None

    def until(self, kind: type, number: int) -> Any:
        while (said := self.hear()) is not None:
            if isinstance(said, kind) and said.id == number:
                return said
        raise AssertionError("it has ended")

    def end_of(self, number: int) -> Finished:
        while not isinstance(event := self.until(Happened, number).event, Finished):
            assert isinstance(event, object)
        return event

    def close(self) -> None:
        self.channel.close()
        self.thread.join(WAIT_S)
        self.served.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Conversation]]:
    conversations: list[Conversation] = []

    def make(*model: Any, opens: bool = True, **options: Any) -> Conversation:
        made = Conversation(make_core(*model, **options), monkeypatch)
        conversations.append(made)
        if opens:
            made.say(Open("folder", EngineConfig()))
            assert made.hear() == Loading("kernels", 1, 2)
            assert made.hear() == Ready(made.core.info)
        return made

    yield make
    for made in conversations:
        made.close()
        made.core.close()


def ask(**params: object) -> Request:
    return Request(token_ids=(START,), params=SamplingParams(**{"temperature": 0.0, **params}))


def test_questions_are_answered(start: Callable[..., Conversation]) -> None:
    engine = start(says("yes"))
    engine.say(
        Tokenize(1, Request(text="hello")), Detokenize(2, tuple(byte_ids("é"))), Detokenize(3, (-1,)), Measure(4)
    )
    replies = {reply.id: reply.value for reply in (engine.hear() for _ in range(4))}
    assert replies[1] == tuple(engine.core.intake.prompt(Request(text="hello"))[0])
    assert replies[2] == "é"
    assert isinstance(replies[3], ParameterError)
    assert isinstance(replies[4], Statistics)


def test_a_cancel_may_come_before_its_request_has_started(
    start: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(says("yes"))
    taken_in, go = threading.Event(), threading.Event()
    prepare = engine.core.prepare

    def slow(*arguments: Any) -> Any:
        taken_in.set()
        assert go.wait(WAIT_S)
        return prepare(*arguments)

    monkeypatch.setattr(engine.core, "prepare", slow)
    gate = Gate(engine.core)
    engine.say(Submit(1, ask()))
    assert taken_in.wait(WAIT_S)
    engine.say(Cancel(1), Cancel(99), Measure(2))  # whose reply says that the cancel was read
    engine.until(Reply, 2)
    go.set()
    gate.open.set()
    assert engine.end_of(1).reason is FinishReason.CANCELLED


def test_slow_requests_do_not_stop_quick_ones(
    start: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(says("yes"))
    go = threading.Event()
    monkeypatch.setattr(engine.core.intake, "detokenize", lambda ids: str(go.wait(WAIT_S)))
    engine.say(*[Detokenize(number, ()) for number in range(1, child._INTAKE_THREADS)], Submit(9, ask()))
    assert engine.end_of(9).reason is FinishReason.STOP
    go.set()


def test_a_surprise_is_the_error_of_its_request(
    start: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(says("yes"))
    monkeypatch.setattr(engine.core.intake, "detokenize", lambda ids: 1 // 0)
    engine.say(Detokenize(1, ()), Submit(2, ask()))
    error = engine.until(Reply, 1).value
    assert isinstance(error, GenerationError)
    assert "ZeroDivisionError" in str(error)
    assert engine.end_of(2).reason is FinishReason.STOP


def test_an_answer_too_large_for_a_frame_is_an_error(
    start: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(says("yes"))
    monkeypatch.setattr("edge_llm.engine.wire.MAX_FRAME_BYTES", 5000)
    engine.say(Detokenize(1, tuple(byte_ids("x" * 1000))))
    assert engine.until(Reply, 1).value == "x" * 1000
    engine.say(Tokenize(2, Request(text="é" * 1200)))
    error = engine.until(Reply, 2).value
    assert isinstance(error, ParameterError)
    assert error.hint == "ask for less"


def test_closing_waits_for_requests_that_can_still_be_cancelled(start: Callable[..., Conversation]) -> None:
    engine = start(slots=1)
    gate = Gate(engine.core, 3)
    for number, most in ((1, 5), (2, 200)):
        engine.say(Submit(number, ask(max_tokens=most)))
        assert engine.until(Reply, number).value is None
    with gate:
        engine.say(Close(True), Cancel(2), Submit(3, ask()))
        assert "closed" in str(engine.until(Reply, 3).value)
    assert engine.end_of(1).reason is FinishReason.LENGTH
    said = [engine.hear()]
    while said[-1] is not None:
        said.append(engine.hear())
    assert isinstance(said[-2], Closed)
    assert said[-2].statistics.request_success == {"length": 1, "cancelled": 1}
    assert engine.core.session.closed


def test_what_is_not_for_an_engine_ends_it(start: Callable[..., Conversation]) -> None:
    engine = start()
    engine.say(Happened(1, TextDelta("x")))
    engine.thread.join(WAIT_S)
    assert isinstance(engine.error, WireError)


def test_who_says_nothing_first_gets_no_engine(start: Callable[..., Conversation]) -> None:
    engine = start(opens=False)
    engine.say(Measure(1))
    engine.thread.join(WAIT_S)
    assert not engine.thread.is_alive()
    assert engine.error is None


def test_a_load_that_fails_is_told(start: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> EngineCore:
        raise ModelFormatError("broken", hint="mend it")

    engine = start(opens=False)
    monkeypatch.setattr(child, "open_engine", fail)
    engine.say(Open("folder", EngineConfig()))
    said = engine.hear()
    assert isinstance(said, Failed)
    assert (str(said.error), said.error.hint) == ("broken", "mend it")
    assert engine.hear() is None
