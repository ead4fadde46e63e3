"""ProcessClient: the child's life and death; over fakes, so that everything can be made to happen to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine import child_process
from edge_llm.engine.process_client import ProcessClient
from edge_llm.engine.request import Request
from edge_llm.engine.supervisor import EngineState, Phase
from edge_llm.errors import EngineStoppedError, ModelFormatError, ParameterError
from edge_llm.sampling.params import SamplingParams
from tests.engine.fake_child import FAULT, HANG, START
from tests.engine.fakes import PARIS
from tests.engine.fakes import START as FIRST_TOKEN
from tests.engine.test_client_contract import WAIT_S, happens

CONFIG = EngineConfig(context=99, slots=2)


class Opener:
    """Opens clients of fake children, and closes them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: list[EngineState] = []
        self._clients: list[ProcessClient] = []

    def __call__(self, name: str = "sound", **options: object) -> ProcessClient:
        client = ProcessClient(self.folder / name, CONFIG, on_state=self.states.append, **options)
        self._clients.append(client)
        return client

    def phases(self) -> list[Phase]:
        return [state.phase for state in self.states if not state.what]

    def close(self) -> None:
        for client in self._clients:
            client.close()
            assert not client._supervisor._thread.is_alive()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    monkeypatch.setattr(child_process, "_START", START)
    opener = Opener(tmp_path)
    yield opener
    opener.close()


def ask(*token_ids: int) -> Request:
    return Request(token_ids=(*token_ids, FIRST_TOKEN), params=SamplingParams(temperature=0))


def pid_of(client: ProcessClient) -> int:
    return client._supervisor._child.pid


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one whose parent has not asked yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- life --------------------------------------------------------------------------------------------------------------


def test_states_are_told_in_order(start: Opener) -> None:
    client = start()
    assert start.states == [
        EngineState(Phase.LOADING),
        EngineState(Phase.LOADING, "kernels", 1, 2),
        EngineState(Phase.READY),
    ]
    pid = pid_of(client)
    client.close()
    assert start.states[3:] == [EngineState(Phase.STOPPED)]
    assert not alive(pid)


def test_a_child_knows_no_secrets(start: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    monkeypatch.setenv("EDGE_LLM_API_KEY", "canary too")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    client = start()
    environment = Path(f"/proc/{pid_of(client)}/environ").read_bytes()
    assert b"canary" not in environment
    assert os.environb[b"EDGE_LLM_HOME"] in environment
    assert b"MALLOC_ARENA_MAX=7" in environment
    descriptors = [os.readlink(path) for path in Path(f"/proc/{pid_of(client)}/fd").iterdir()]
    assert sum(target.startswith("socket:") for target in descriptors) == 1


def test_modules_come_from_where_ours_come_from(start: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that one merely stands in is none of them."""
    (tmp_path / "json.py").write_text("raise SystemExit('taken over')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [os.path.abspath(place) for place in sys.path if place])
    assert start().submit(ask()).text() == PARIS


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see wake-ups")
def test_both_sides_sleep_while_nobody_asks(start: Opener) -> None:
    """B35."""
    client = start()
    assert client.submit(ask()).text() == PARIS
    supervisor = client._supervisor
    threads = [supervisor._thread, supervisor._child.channel._writer, supervisor._child._listener]
    ours = [Path(f"/proc/self/task/{thread.native_id}/status") for thread in threads]

    def switches() -> list[str]:
        theirs = [task / "status" for task in Path(f"/proc/{pid_of(client)}/task").iterdir()]
        lines = [line for file in (*ours, *theirs) for line in file.read_text().splitlines()]
        return [line for line in lines if "ctxt_switches" in line]

    def rested() -> bool:
        before = switches()
        threading.Event().wait(0.3)
        return switches() == before

    assert happens(rested)


def test_signals_for_everybody_do_not_end_the_child(start: Opener) -> None:
    client = start()
    pid = pid_of(client)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert client.submit(ask()).text() == PARIS
    assert pid_of(client) == pid
    assert os.getpgid(pid) != os.getpgid(0)


def test_a_closed_client_can_still_be_asked_what_it_did(start: Opener) -> None:
    client = start()
    client.submit(ask()).text()
    client.close()
    assert client.statistics().request_success == {"stop": 1}
    for refused in (lambda: client.submit(ask()), lambda: client.tokenize(ask()), lambda: client.detokenize([5])):
        with pytest.raises(EngineStoppedError, match="closed"):
            refused()


def test_a_child_that_loads_is_not_waited_for(start: Opener) -> None:
    failures: list[BaseException] = []

    def load() -> None:
        try:
            start("slow")
        except EngineStoppedError as error:
            failures.append(error)

    before = set(threading.enumerate())
    loading = threading.Thread(target=load)
    loading.start()
    assert happens(lambda: len(start.states) == 2)
    (supervisor,) = (t for t in set(threading.enumerate()) - before if t.name == "edge-llm supervisor")
    supervisor._target.__self__.stop()
    loading.join(WAIT_S)
    assert not loading.is_alive()
    assert "closed" in str(failures[0])


# --- death -------------------------------------------------------------------------------------------------------------


def test_after_a_death_the_next_request_is_answered(start: Opener) -> None:
    client = start()
    first = pid_of(client)
    os.kill(first, signal.SIGKILL)
    assert happens(lambda: client._supervisor._child is None or pid_of(client) != first)
    assert client.submit(ask()).text() == PARIS
    assert pid_of(client) != first
    assert start.phases() == [Phase.LOADING, Phase.READY] * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_ends_what_waits_for_a_reply_too(start: Opener, number: signal.Signals) -> None:
    client = start()
    caught: list[EngineStoppedError] = []

    def wait() -> None:
        try:
            client.submit(ask(HANG))
        except EngineStoppedError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert happens(lambda: len(client._supervisor._replies) == 1)
    os.kill(pid_of(client), number)
    waiting.join(WAIT_S)
    assert number.name in str(caught[0])
    assert ("Segmentation fault" in str(caught[0].hint)) == (number is signal.SIGSEGV)


def test_a_request_that_the_engine_does_not_survive_is_told_why(start: Opener) -> None:
    client = start()
    handles = [client.submit(ask()), client.submit(ask(FAULT))]
    with pytest.raises(EngineStoppedError, match="no room"):
        handles[1].text()
    assert client.submit(ask()).text() == PARIS


def test_deaths_in_short_order_are_refused_at_once(start: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm.engine.supervisor._FIRST_DELAY_S", 0.05)
    client = start()
    supervisor = client._supervisor
    os.kill(pid_of(client), signal.SIGKILL)
    assert happens(lambda: len(start.phases()) >= 4)
    assert start.phases()[-1] is Phase.READY
    monkeypatch.setattr("edge_llm.engine.supervisor._FIRST_DELAY_S", 3600.0)
    os.kill(pid_of(client), signal.SIGKILL)
    assert happens(lambda: supervisor._phase is Phase.STOPPED)
    with pytest.raises(EngineStoppedError, match="SIGKILL") as caught:
        client.submit(ask())
    assert "again" in caught.value.hint
    assert isinstance(start.states[-1].error, EngineStoppedError)


def test_a_model_that_no_longer_loads_is_tried_again(start: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm.engine.supervisor._FIRST_DELAY_S", 0.05)
    client = start()
    (start.folder / "sound").mkdir()
    broken = start.folder / "sound" / "broken"
    broken.touch()
    os.kill(pid_of(client), signal.SIGKILL)
    assert happens(lambda: isinstance(start.states[-1].error, ModelFormatError))
    broken.unlink()
    assert happens(lambda: client._supervisor._phase is Phase.READY)
    assert client.submit(ask()).text() == PARIS


def test_what_cannot_be_loaded_is_said_as_the_child_says_it(start: Opener) -> None:
    with pytest.raises(ModelFormatError, match="the file is broken") as caught:
        start("broken")
    assert caught.value.hint == "mend it"
    assert start.phases() == [Phase.LOADING, Phase.STOPPED]


def test_a_crash_while_loading_is_told_with_its_last_words(start: Opener) -> None:
    with pytest.raises(EngineStoppedError, match="SIGABRT") as caught:
        start("crashes")
    assert caught.value.hint is not None
    assert "\x1b" not in caught.value.hint


def test_a_child_that_hangs_is_killed(start: Opener) -> None:
    client = start(reply_timeout_s=0.2)
    first = pid_of(client)
    with pytest.raises(EngineStoppedError, match="hangs"):
        client.submit(ask(HANG))
    assert happens(lambda: not alive(first))
    client._supervisor._reply_timeout_s = WAIT_S
    assert client.submit(ask()).text() == PARIS


def test_what_is_too_large_is_refused_and_hurts_nobody(start: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    client = start()
    monkeypatch.setattr("edge_llm.engine.wire.MAX_FRAME_BYTES", 100_000)
    with pytest.raises(ParameterError, match="cannot be sent"):
        client.submit(Request(text="x" * 200_000))
    assert client.submit(ask()).text() == PARIS


# --- parents ------------------------------------------------------------------------------------------------------------

PARENT = f"""
import os, sys, threading
from pathlib import Path
from edge_llm.config import EngineConfig
from edge_llm.engine import child_process
from edge_llm.engine.process_client import ProcessClient
child_process._START = {START!r}
client = ProcessClient(Path("sound"), EngineConfig(context=99, slots=2))
print(client._supervisor._child.pid, flush=True)
if sys.argv[1] == "fork" and os.fork() == 0:
    os.close(1)
    sys.stdin.read()  # lives for as long as the test wants
    os._exit(0)
threading.Event().wait()
"""


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_a_child_does_not_outlive_its_parent(kind: str) -> None:
    """Neither when a forked copy of the parent lives on."""
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PARENT, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        assert happens(lambda: not alive(child))


def test_a_program_that_just_ends_takes_its_engine_with_it() -> None:
    code = PARENT.replace(
        "threading.Event().wait()",
        "client.submit(__import__('tests.engine.test_process_client', fromlist=['ask']).ask())",
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "alone"], capture_output=True, text=True, timeout=60, check=True
    )
    assert happens(lambda: not alive(int(result.stdout)))
    assert result.stderr == ""
