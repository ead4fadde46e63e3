from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_llm import machine
from edge_llm.config import EngineConfig
from edge_llm.engine import tuning
from edge_llm.engine.tuning import EngineRig, most_slots, thread_counts, tune
from edge_llm.errors import InputError


class FakeRig:
    """Seconds by a function of the config alone; keeps what was measured."""

    def __init__(self, seconds: Callable[[EngineConfig], float]) -> None:
        self._seconds = seconds
        self.measured: list[tuple[str, EngineConfig]] = []
        self.closed = 0

    def turn(self, config: EngineConfig) -> float:
        return self._measure("turn", config)

    def long_prompt(self, config: EngineConfig) -> float:
        return self._measure("long_prompt", config)

    def tokens(self, config: EngineConfig, conversations: int) -> float:
        return self._measure(f"tokens of {conversations}", config)

    def close(self) -> None:
        self.closed += 1

    def _measure(self, what: str, config: EngineConfig) -> float:
        self.measured.append((what, config))
        return self._seconds(config)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(tuning, "default_threads", lambda: 4)


def test_what_makes_no_difference_stays() -> None:
    rig = FakeRig(lambda _config: 1.0)
    decisions = list(tune(rig, EngineConfig(), most_slots=None))
    assert [(d.setting, d.usual, d.chosen, d.tried) for d in decisions] == [
        ("threads", 4, 4, (2, 3, 8)),
        ("max_chunk", 256, 256, (128, 512)),
        ("spin_us", 400, 400, (100, 2000)),
        ("slots", 8, 8, (16, 32)),
    ]
    assert rig.closed == 4
    assert {what for what, _ in rig.measured} == {
        "turn",
        "long_prompt",
        "tokens of 1",
        "tokens of 8",
        "tokens of 16",
        "tokens of 32",
    }


def test_each_setting_is_tried_with_those_that_were_chosen_before() -> None:
    rig = FakeRig(lambda config: 1.0 / (config.threads or 4) / config.slots)
    decisions = list(tune(rig, EngineConfig(), most_slots=20))
    assert {d.setting: d.chosen for d in decisions} == {"threads": 8, "max_chunk": 256, "spin_us": 400, "slots": 16}
    assert [d.gain for d in decisions] == [1.0, 0.0, 0.0, 1.0]
    assert all(config.threads == 8 for what, config in rig.measured if what != "turn")


def test_many_conversations_must_gain_more_than_a_little_and_have_room() -> None:
    (*_, slots) = tune(FakeRig(lambda config: 1.0 - config.slots / 400), EngineConfig(), most_slots=None)
    assert (slots.chosen, slots.tried) == (8, (16, 32))
    (*_, slots) = tune(FakeRig(lambda config: 1.0 / config.slots), EngineConfig(), most_slots=10)
    assert (slots.chosen, slots.tried, slots.rounds) == (8, (), 0)


def test_what_the_user_has_set_is_not_tried() -> None:
    rig = FakeRig(lambda _config: 1.0)
    decisions = tune(rig, EngineConfig(threads=3, max_chunk=64, slots=2), most_slots=None)
    assert [d.setting for d in decisions] == ["spin_us"]
    assert all((config.threads, config.max_chunk) == (3, 64) for _, config in rig.measured)


def test_engines_are_closed_when_it_is_interrupted() -> None:
    def press(_config: EngineConfig) -> float:
        raise KeyboardInterrupt

    rig = FakeRig(press)
    with pytest.raises(KeyboardInterrupt):
        list(tune(rig, EngineConfig(), most_slots=None))
    assert rig.closed == 1


@pytest.mark.parametrize(
    ("cores", "cpus", "counts"),
    [(1, 1, []), (1, 2, [2]), (2, 2, [1]), (3, 3, [1, 2]), (4, 8, [2, 3, 8]), (16, 32, [8, 12, 15, 32])],
)
def test_thread_counts(monkeypatch: pytest.MonkeyPatch, cores: int, cpus: int, counts: list[int]) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: frozenset(range(cpus)))
    assert thread_counts(cores) == counts


def test_slots_have_room_for_whole_contexts(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda *_: None)
    assert most_slots(tiny_folder, EngineConfig()) is None
    monkeypatch.setattr(machine, "available_memory", lambda *_: 1 << 30)
    whole, half = (most_slots(tiny_folder, EngineConfig(context=context)) for context in (512, 256))
    assert whole is not None
    assert half is not None
    assert half // whole == 2
    assert most_slots(tiny_folder, EngineConfig(context=512, kv_budget_bytes=(1 << 29) // whole)) == 1


def test_a_rig_measures_engines_of_a_model(kernels: object, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[EngineConfig] = []
    open_engine = tuning.open_engine
    monkeypatch.setattr(
        tuning, "open_engine", lambda folder, config, _: opened.append(config) or open_engine(folder, config)
    )
    config = EngineConfig(threads=1)
    rig = EngineRig(tiny_folder)
    try:
        assert rig.open(config).info.layout == "ring"
        rig.adapt(config)
        assert rig.turn(config) > 0
        assert rig.long_prompt(config.with_options(max_chunk=64)) > 0
        assert rig.tokens(config, 8) > 0
        assert not rig.open(config).has_work
    finally:
        rig.close()
    assert [(c.max_chunk, c.prefix_cache, c.speculation) for c in opened] == [(256, "off", "off"), (64, "off", "off")]
    with pytest.raises(InputError, match="nothing to tune"):
        EngineRig(tiny_folder).turn(config.with_options(layout="static"))
