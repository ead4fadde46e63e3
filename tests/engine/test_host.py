"""EngineHost: who is loaded when, over fakes with a clock of their own; then two tiny models in processes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.host import EngineHost, usual_bytes
from edge_llm.engine.process_client import ProcessClient
from edge_llm.engine.request import Request
from edge_llm.errors import ContextLengthError, EngineStoppedError, ModelFormatError, ModelNotFoundError, QueueFullError
from edge_llm.model.manifest import ModelManifest
from edge_llm.sampling.params import SamplingParams
from tests.conftest import export
from tests.engine.test_client_contract import WAIT_S, happens
from tools.tiny_model import write_tiny_gguf

SIZES = {"small": 10, "middle": 40, "large": 60, "huge": 500}


class FakeClient:
    def __init__(self, name: str) -> None:
        self.info = SimpleNamespace(name=name)
        self.closed: list[bool] = []
        self.closing = threading.Event()
        self.closing.set()

    def statistics(self) -> str:
        if self.closed:
            raise EngineStoppedError("closed")
        return f"statistics of {self.info.name}"

    def close(self, *, drain: bool = False) -> None:
        assert self.closing.wait(WAIT_S)
        self.closed.append(drain)


class Rig:
    """A host of fake engines; `fail` holds the models that cannot be loaded, `gate` holds loads up."""

    def __init__(self, budget: int = 100, keep_alive_s: float = 60.0) -> None:
        self.now = 0.0
        self.loads: list[str] = []
        self.clients: list[FakeClient] = []
        self.fail: dict[str, BaseException] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.host = EngineHost(
            {name: Path("models", name) for name in SIZES},
            self._load,
            bytes_of=lambda folder: SIZES[folder.name],
            budget_bytes=budget,
            keep_alive_s=keep_alive_s,
            clock=lambda: self.now,
        )

    def _load(self, folder: Path) -> Any:
        self.loads.append(folder.name)
        assert self.gate.wait(WAIT_S)
        if folder.name in self.fail:
            raise self.fail[folder.name]
        alive = sum(SIZES[client.info.name] for client in self.clients if not client.closed)
        assert alive == 0 or alive + SIZES[folder.name] <= self.host._budget, "more than the budget is loaded"
        self.clients.append(FakeClient(folder.name))
        return self.clients[-1]

    def use(self, name: str) -> None:
        with self.host.open(name) as client:
            assert client.info.name == name
            assert not client.closed
        self.now += 1

    def names(self) -> list[str]:
        return [info.name for info in self.host.loaded()]


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for made in rigs:
        made.host.close()
        assert all(client.closed for client in made.clients)
        assert happens(lambda made=made: made.host._sweeper is None)


def test_a_model_is_loaded_once_and_stays(rig: Callable[..., Rig]) -> None:
    made = rig()
    for _ in range(3):
        made.use("small")
    assert made.loads == ["small"]
    assert made.names() == ["small"]
    assert made.host.statistics() == {"small": "statistics of small"}


def test_what_is_there_can_be_held_without_waiting(rig: Callable[..., Rig]) -> None:
    made = rig(budget=99)
    assert made.host.open_ready("large") is None
    made.use("large")
    held = made.host.open_ready("large")
    assert held is not None
    with held as client:
        with pytest.raises(QueueFullError), made.host.open("middle"):
            pass
        assert client.info.name == "large"
    made.use("middle")
    assert made.host.open_ready("large") is None
    made.host.close()
    assert made.host.open_ready("middle") is None


def test_an_unknown_name_is_refused(rig: Callable[..., Rig]) -> None:
    with pytest.raises(ModelNotFoundError, match="'nobody'") as caught:
        rig().use("nobody")
    assert "small, middle, large" in caught.value.hint


def test_those_who_ask_together_wait_for_one_load(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(made.use, "small") for _ in range(8)]
        assert happens(lambda: made.loads == ["small"])
        assert made.names() == []
        made.gate.set()
        for future in waiting:
            future.result(WAIT_S)
    assert made.loads == ["small"]


def test_a_failure_is_told_to_all_who_wait_and_tried_again_later(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.gate.clear()
    made.fail["small"] = ContextLengthError(5, 4)
    errors: list[BaseException] = []

    def use() -> None:
        try:
            made.use("small")
        except ContextLengthError as error:
            errors.append(error)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(use) for _ in range(4)]
        assert happens(lambda: made.host._entries and made.host._entries["small"].users == 4)
        made.gate.set()
        for future in futures:
            future.result(WAIT_S)
    assert made.loads == ["small"]
    assert [(error.prompt_tokens, error.context) for error in errors] == [(5, 4)] * 4
    assert len({id(error) for error in errors}) == 4
    made.fail.clear()
    made.use("small")
    assert made.names() == ["small"]


def test_whatever_stops_a_load_frees_those_who_wait(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.gate.clear()
    made.fail["small"] = KeyboardInterrupt()
    caught: list[BaseException] = []

    def use() -> None:
        try:
            made.use("small")
        except (KeyboardInterrupt, EngineStoppedError) as error:
            caught.append(error)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert happens(lambda: made.host._entries and made.host._entries["small"].users == 2)
    made.gate.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert {type(error) for error in caught} == {KeyboardInterrupt, EngineStoppedError}


def test_the_one_unused_for_longest_makes_room(rig: Callable[..., Rig]) -> None:
    made = rig(budget=100)
    for name in ("middle", "small", "middle", "large"):
        made.use(name)
    assert made.names() == ["large", "middle"]
    made.use("small")
    assert made.names() == ["small", "large"]
    assert made.loads == ["middle", "small", "large", "small"]


def test_one_that_is_used_stays_and_the_rest_is_refused(rig: Callable[..., Rig]) -> None:
    made = rig(budget=100)
    made.use("small")
    with made.host.open("middle") as client:
        with pytest.raises(QueueFullError, match="no memory for huge") as caught:
            made.use("huge")
        assert caught.value.retry_after_s > 0
        assert not client.closed
        made.use("large")
    made.use("small")
    assert made.loads == ["small", "middle", "large", "small"]


def test_a_model_beyond_the_budget_is_held_alone(rig: Callable[..., Rig]) -> None:
    made = rig(budget=100)
    made.use("small")
    made.use("huge")
    assert made.names() == ["huge"]
    made.use("small")
    assert made.names() == ["small"]


def test_idle_engines_are_unloaded_in_time(rig: Callable[..., Rig]) -> None:
    made = rig(keep_alive_s=60.0)
    made.use("small")  # until 0 + 60
    with made.host.open("middle"):
        made.now = 59.9
        made.host.unload_idle()
        assert sorted(made.names()) == ["middle", "small"]
        made.now = 60.0
        made.host.unload_idle()
        assert made.names() == ["middle"]
        made.now = 1000.0
        made.host.unload_idle()
        assert made.names() == ["middle"]
    made.now = 1059.0
    made.host.unload_idle()
    assert made.names() == ["middle"]
    made.now = 1060.0
    made.host.unload_idle()
    assert made.names() == []


def test_the_host_unloads_by_itself(rig: Callable[..., Rig]) -> None:
    made = rig(keep_alive_s=0.0)
    made.use("small")
    assert happens(lambda: made.clients[0].closed == [False])
    assert happens(lambda: made.host._sweeper is None)
    made.use("small")
    assert happens(lambda: len(made.clients) == 2 and made.clients[1].closed == [False])


def test_nothing_is_unloaded_if_it_shall_stay(rig: Callable[..., Rig]) -> None:
    made = rig(keep_alive_s=float("inf"))
    made.use("small")
    made.now = 1e12
    made.host.unload_idle()
    assert made.names() == ["small"]
    assert made.host._sweeper is None


def test_who_asks_while_a_model_is_unloaded_gets_a_new_one(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.use("small")
    made.clients[0].closing.clear()
    made.now = 1000.0
    unloading = threading.Thread(target=made.host.unload_idle)
    unloading.start()
    assert happens(lambda: made.names() == [])
    asking = threading.Thread(target=made.use, args=("small",))
    asking.start()
    asking.join(0.05)
    assert made.loads == ["small"]
    made.clients[0].closing.set()
    for thread in (asking, unloading):
        thread.join(WAIT_S)
    assert made.loads == ["small", "small"]


def test_close_ends_what_is_used_and_what_is_loading(rig: Callable[..., Rig]) -> None:
    made = rig()
    caught: list[BaseException] = []

    def use(name: str) -> None:
        try:
            made.use(name)
        except EngineStoppedError as error:
            caught.append(error)

    with made.host.open("small"):
        made.gate.clear()
        threads = [threading.Thread(target=use, args=("middle",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert happens(lambda: len(made.loads) == 2)
        made.host.close(drain=True)
        assert made.clients[0].closed == [True]
    made.gate.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(caught) == 2
    assert made.names() == []
    with pytest.raises(EngineStoppedError, match="closed"):
        made.use("small")


def test_many_callers_at_once_keep_within_the_budget(rig: Callable[..., Rig]) -> None:
    made = rig(budget=100)

    def use(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(40):
            try:
                made.use(choose.choice(["small", "middle", "large"]))
            except QueueFullError:
                continue
            made.host.unload_idle()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(use, seed) for seed in range(4)]:
            future.result(WAIT_S)
    assert all(entry.users == 0 for entry in made.host._entries.values())
    assert sum(not client.closed for client in made.clients) == len(made.names())


def test_what_an_engine_takes_is_told_from_its_manifest(tiny_folder: Path) -> None:
    manifest = ModelManifest.read(tiny_folder)
    size = manifest.dimensions
    least = usual_bytes(tiny_folder, EngineConfig(context=1))
    assert least > manifest.weight_bytes
    rows = usual_bytes(tiny_folder, EngineConfig(context=101)) - least
    assert usual_bytes(tiny_folder, EngineConfig(context=1, layout="static")) > least
    assert rows == 100 * 2 * len(manifest.layers) * size.kv_heads * (size.head_dim + 4)
    with pytest.raises(ModelFormatError):
        usual_bytes(tiny_folder / "nowhere", EngineConfig())


def test_two_models_in_processes_take_turns(tiny_folder: Path, tmp_path: Path, kernels: object) -> None:
    (tmp_path / "other").mkdir()
    other = export(write_tiny_gguf(tmp_path / "other" / "other.gguf", seed=7), tmp_path / "other" / "exported")
    config = EngineConfig(context=256, slots=1, max_chunk=64)
    host = EngineHost(
        {"tiny": tiny_folder, "other": other},
        lambda folder: ProcessClient(folder, config),
        bytes_of=lambda folder: usual_bytes(folder, config),
        budget_bytes=usual_bytes(tiny_folder, config),
    )

    def answer(name: str) -> tuple[int, ...]:
        with host.open(name) as client:
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            handle = client.submit(Request.completion("Once upon a time", params))
            handle.text()
            return handle.finished.token_ids

    first = answer("tiny")
    assert answer("other") != first
    assert len(host.loaded()) == 1
    assert answer("tiny") == first
    assert host.statistics()["tiny"].request_success == {"length": 1}
    host.close(drain=True)
    assert host.loaded() == ()
