"""Supervisor: processes that say and do what a test wants, on the other end of a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine import supervisor as module
from edge_llm.engine.channel import Channel
from edge_llm.engine.handle import Handle, Mailbox
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.protocol import Cancel, Close, Detokenize, Failed, Happened, Loading, Open, Ready, Reply, Submit
from edge_llm.engine.request import Request
from edge_llm.engine.supervisor import EngineState, Phase, RestartPolicy, Supervisor
from edge_llm.engine.wire import frame
from edge_llm.errors import EngineStoppedError, ModelFormatError, QueueFullError
from edge_llm.messages import Finished, FinishReason, TextDelta, Timings, Usage
from tests.engine.test_client_contract import WAIT_S, happens

INFO = EngineInfo("fake", 9, 1, 9, True, "", "ring", "int8", 1, 1)
END = Finished(FinishReason.STOP, Usage(1, 1), Timings(0.0, None, 0.0), 1)
Script = Callable[["FakeProcess", Any], None]


class FakeProcess:
    """Answers each message as its script does, on a thread; `said` is what it was told."""

    def __init__(self, script: Script) -> None:
        ours, theirs = socket.socketpair()
        self.channel, self.other = Channel(ours), Channel(theirs)
        self.said: list[Any] = []
        self.killed = threading.Event()
        self._script = script
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while messages := self.other.receive():
            for message in messages:
                self.said.append(message)
                self._script(self, message)

    def say(self, *values: object) -> None:
        for value in values:
            self.other.send(value)

    def kill(self) -> None:
        self.killed.set()
        self.other.socket.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float) -> EngineStoppedError:
        self.channel.close()
        self._thread.join()
        self.other.close()
        return EngineStoppedError("it died", hint="of something")


class Rig:
    """A supervisor over fake processes, a script each; the last one's is used again."""

    def __init__(self, *scripts: Script, clock: Callable[[], float] = lambda: 0.0, timeout_s: float = WAIT_S) -> None:
        self.processes: list[FakeProcess] = []
        self.states: list[EngineState] = []
        self._scripts = scripts
        self.supervisor = Supervisor(
            Path("model"),
            EngineConfig(),
            on_state=self.states.append,
            reply_timeout_s=timeout_s,
            start=self._start,
            clock=clock,
        )

    def _start(self) -> Any:
        script = self._scripts[min(len(self.processes), len(self._scripts) - 1)]
        self.processes.append(FakeProcess(script))
        return self.processes[-1]

    def submit(self) -> Handle:
        mailbox = Mailbox()
        _, cancel = self.supervisor.request(lambda number: Submit(number, Request(text="x")), mailbox)
        return Handle(mailbox, cancel)

    def detokenize(self) -> Any:
        return self.supervisor.request(lambda number: Detokenize(number, (1,)))[0]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    monkeypatch.setattr(module, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(module, "_LONGEST_DELAY_S", 0.02)
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    rigs: list[Rig] = []

    def make(*scripts: Script, **options: Any) -> Rig:
        rigs.append(Rig(*scripts, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.supervisor.stop()
        assert not rig.supervisor._thread.is_alive()


def sound(process: FakeProcess, message: Any) -> None:
    match message:
        case Open():
            process.say(Loading("it", 1, 2), Ready(INFO))
        case Submit(number, _):
            process.say(Happened(number, TextDelta("a")), Reply(number), Happened(number, END))
        case Detokenize(number, _):
            process.say(Reply(number, "text"))
        case Close():
            process.other.finish()


def only_opens(process: FakeProcess, message: Any) -> None:
    if isinstance(message, Open | Close):
        sound(process, message)


def test_events_may_come_before_the_reply(start: Callable[..., Rig]) -> None:
    rig = start(sound)
    assert list(rig.submit()) == [TextDelta("a"), END]
    assert rig.detokenize() == "text"
    assert rig.supervisor.info == INFO
    assert rig.processes[0].said[0] == Open("model", EngineConfig())
    assert rig.states == [EngineState(Phase.LOADING), EngineState(Phase.LOADING, "it", 1, 2), EngineState(Phase.READY)]


@pytest.mark.parametrize(
    "said",
    [b"\xff\xff\xff\xff", b"\0\0\0\2{}", frame([Cancel(1)]), frame([Request(text="x")]), b"\0\0\0\0"],
    ids=["large", "no list", "wrong way", "wrong kind", "empty"],
)
def test_a_process_that_does_not_keep_to_the_protocol_is_replaced(start: Callable[..., Rig], said: bytes) -> None:
    """As a broken library inside it might make it."""

    def babbling(process: FakeProcess, message: Any) -> None:
        if isinstance(message, Submit):
            process.say(Reply(message.id), Happened(message.id, TextDelta("a")))
        elif isinstance(message, Cancel):
            process.say(said)
        else:
            sound(process, message)

    rig = start(babbling, sound)
    handle = rig.submit()
    assert next(handle) == TextDelta("a")
    handle.cancel()
    with pytest.raises(EngineStoppedError, match="protocol"):
        handle.text()
    assert rig.processes[0].killed.is_set()
    assert rig.submit().text() == "a"


def test_messages_of_unknown_numbers_are_dropped(start: Callable[..., Rig]) -> None:
    def confused(process: FakeProcess, message: Any) -> None:
        process.say(*[Reply(77, "x"), Happened(77, END)] if not isinstance(message, Open) else [])
        sound(process, message)

    rig = start(confused)
    assert rig.submit().text() == "a"
    assert len(rig.processes) == 1


def test_an_engine_that_has_stopped_in_a_living_process_is_replaced(start: Callable[..., Rig]) -> None:
    """The one that hears of it is told why, and so are all the others."""

    def stopping(process: FakeProcess, message: Any) -> None:
        if isinstance(message, Submit):
            process.say(Reply(message.id))
            if message.id == 2:
                process.say(Happened(2, EngineStoppedError("no room")))
        else:
            sound(process, message)

    rig = start(stopping, sound)
    for handle in (rig.submit(), rig.submit()):
        with pytest.raises(EngineStoppedError, match="no room"):
            handle.text()
    assert rig.submit().text() == "a"
    assert rig.processes[0].killed.is_set()


def test_a_refusal_leaves_nothing_behind(start: Callable[..., Rig]) -> None:
    def refusing(process: FakeProcess, message: Any) -> None:
        if isinstance(message, Submit):
            process.say(Reply(message.id, QueueFullError("full", retry_after_s=2.5, hint="later")))
        else:
            sound(process, message)

    rig = start(refusing)
    with pytest.raises(QueueFullError) as caught:
        rig.submit()
    assert (caught.value.retry_after_s, caught.value.hint) == (2.5, "later")
    assert not rig.supervisor._readers
    assert not rig.supervisor._replies


def test_a_process_without_a_reply_hangs(start: Callable[..., Rig]) -> None:
    rig = start(only_opens, sound, timeout_s=0.05)
    with pytest.raises(EngineStoppedError, match="hangs"):
        rig.submit()
    assert rig.processes[0].killed.wait(WAIT_S)
    rig.supervisor._reply_timeout_s = WAIT_S
    assert rig.submit().text() == "a"


def test_an_interrupted_submit_cancels(start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it waits for the reply."""

    class Interrupted:
        def get(self, timeout: float) -> None:
            raise KeyboardInterrupt

    rig = start(only_opens)
    rig.supervisor.wait_until_loaded()
    monkeypatch.setattr(module, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.submit()
    assert happens(lambda: Cancel(1) in rig.processes[0].said)
    assert not rig.supervisor._readers


def test_a_request_waits_while_the_process_loads(start: Callable[..., Rig]) -> None:
    loaded = threading.Event()

    def slow(process: FakeProcess, message: Any) -> None:
        if isinstance(message, Open):
            assert loaded.wait(WAIT_S)
        sound(process, message)

    rig = start(sound, slow)
    assert rig.submit().text() == "a"
    rig.processes[0].kill()
    assert happens(lambda: len(rig.processes) == 2)
    texts: list[str] = []
    asking = threading.Thread(target=lambda: texts.append(rig.submit().text()))
    asking.start()
    loaded.set()
    asking.join(WAIT_S)
    assert texts == ["a"]


def test_a_failed_restart_is_told_and_repeated(start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(process: FakeProcess, message: Any) -> None:
        process.say(Failed(ModelFormatError("gone")))

    rig = start(sound, failing, failing, sound)
    rig.supervisor.wait_until_loaded()
    rig.processes[0].kill()
    assert happens(lambda: len(rig.processes) == 4 and rig.supervisor._phase is Phase.READY)
    assert [str(state.error) for state in rig.states if state.error] == ["gone", "gone"]
    monkeypatch.setattr(module, "_LONGEST_DELAY_S", 3600.0)
    monkeypatch.setattr(module, "_FIRST_DELAY_S", 3600.0)
    rig.processes[3].kill()
    assert happens(lambda: rig.supervisor._phase is Phase.STOPPED)
    with pytest.raises(EngineStoppedError, match="it died"):
        rig.submit()


@pytest.mark.parametrize("error", [ModelFormatError("bad"), EngineStoppedError("no room")])
def test_a_failed_first_start_is_not_repeated(start: Callable[..., Rig], error: ModelFormatError) -> None:
    rig = start(lambda process, message: process.say(Failed(error)))
    with pytest.raises(type(error), match=str(error)):
        rig.supervisor.wait_until_loaded()
    rig.supervisor._thread.join(WAIT_S)
    assert len(rig.processes) == 1
    with pytest.raises(EngineStoppedError):
        rig.submit()


def test_no_process_at_all_is_an_error_too() -> None:
    def refuse() -> Any:
        raise EngineStoppedError("the engine's process cannot be started: out of descriptors")

    made = Supervisor(Path("model"), EngineConfig(), on_state=None, reply_timeout_s=WAIT_S, start=refuse)
    with pytest.raises(EngineStoppedError, match="descriptors"):
        made.wait_until_loaded()


def test_a_callback_that_fails_leaves_nobody_waiting(start: Callable[..., Rig]) -> None:
    rig = start(only_opens)
    rig.supervisor.wait_until_loaded()
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            rig.submit()
        except EngineStoppedError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert happens(lambda: len(rig.processes[0].said) == 2)
    rig.supervisor._on_state = lambda state: 1 // 0
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        rig.processes[0].say(Loading("x", 1, 2))
        asking.join(WAIT_S)
        rig.supervisor._thread.join(WAIT_S)
    finally:
        threading.excepthook = hook
    assert len(caught) == 1
    assert rig.processes[0].killed.is_set()
    with pytest.raises(EngineStoppedError, match="closed"):
        rig.submit()


def test_what_does_not_end_is_killed(start: Callable[..., Rig]) -> None:
    def deaf(process: FakeProcess, message: Any) -> None:
        if not isinstance(message, Close):
            only_opens(process, message)
        if isinstance(message, Submit):
            process.say(Reply(message.id))

    rig = start(deaf)
    handle = rig.submit()
    rig.supervisor.stop()
    assert rig.processes[0].killed.is_set()
    assert Close(False) in rig.processes[0].said
    with pytest.raises(EngineStoppedError):
        handle.text()


def test_waiting_grows_with_deaths_and_a_steady_life_forgives_them() -> None:
    policy = RestartPolicy()
    assert [policy.delay(1.0) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]
    assert [policy.delay(0.0) for _ in range(100)][-1] == 30.0
    assert [policy.delay(lived) for lived in (60.0, 59.0, 0.0, 1e9, 0.0)] == [0.0, 0.5, 1.0, 0.0, 0.5]
