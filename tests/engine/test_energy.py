"""Energy: meters that are files and programs, and whose joules they are."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edge_llm.engine.core import EngineCore
from edge_llm.engine.energy import Configured, EnergyMeter, Pmic, Rapl, find_source
from tests.engine.fakes import make_core
from tests.engine.test_core import ask, run

PI_5 = "Raspberry Pi 5 Model B Rev 1.0\0"
ANSWER = """\
   3V7_WL_SW_A current(0)=0.10000000A
     VDD_CORE_A current(7)=2.00000000A
      1V8_SYS_A current(2)=0.50000000A
   3V7_WL_SW_V volt(8)=3.70000000V
     VDD_CORE_V volt(15)=0.80000000V
       EXT5V_V volt(24)=5.15000000V
"""


def zone(root: Path, path: str, name: str, microjoules: int | None, most: int = 1_000_000) -> Path:
    folder = root / "sys/class/powercap" / path
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    if microjoules is not None:
        (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_packages_and_their_memory_are_summed_and_nothing_twice(tmp_path: Path) -> None:
    counters = [
        zone(tmp_path, path, name, 100)
        for path, name in (
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:0:0", "core"),
            ("intel-rapl:0:2", "dram"),
            ("intel-rapl:1", "package-1"),
            ("intel-rapl:2", "psys"),
            ("intel-rapl-mmio:0", "package-0"),
        )
    ]
    source = Rapl(tmp_path)
    assert source.joules() == 0
    for counter in counters:
        counter.write_text("500100\n")
    assert source.joules() == pytest.approx(1.5)


def test_a_counter_that_tells_nonsense_later_is_none(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    meter = EnergyMeter(Rapl(tmp_path))
    meter.began(0.0)
    counter.write_text("9" * 400)
    meter.ended(1.0, 1.0)
    assert meter.joules is None


def test_a_counter_that_starts_again_goes_on(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    source = Rapl(tmp_path)
    for value, joules in ((950_000, 0.05), (10_000, 0.11), (20_000, 0.12), (0, 1.1)):
        counter.write_text(f"{value}\n")
        assert source.joules() == pytest.approx(joules)


@pytest.mark.parametrize("text", [None, "", "many\n", "é", "-5\n", "9" * 400, "9" * 5000])
def test_what_cannot_be_read_is_no_counter(tmp_path: Path, text: str | None) -> None:
    assert find_source(None, tmp_path) is None
    counter = zone(tmp_path, "intel-rapl:0", "package-0", None)
    if text is not None:
        counter.write_text(text)
    assert find_source(None, tmp_path) is None
    assert isinstance(find_source(7, tmp_path), Configured)


def test_counters_that_are_for_others_only_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on most systems, unless this process is root."""
    read = Path.read_text

    def refused(path: Path, **options: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(path, **options)

    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    monkeypatch.setattr(Path, "read_text", refused)
    assert find_source(None, tmp_path) is None


def test_a_counter_goes_before_the_config(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    assert isinstance(find_source(7, tmp_path), Rapl)


def board(root: Path, model: str) -> None:
    (root / "proc/device-tree").mkdir(parents=True)
    (root / "proc/device-tree/model").write_text(model)


def test_a_power_chip_is_asked_on_a_pi_5_only(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask_pmic() -> str:
        asked.append("")
        return ANSWER

    board(tmp_path / "4", "Raspberry Pi 4 Model B Rev 1.5\0")
    assert find_source(None, tmp_path / "4", ask_pmic) is None
    assert not asked
    for model in (PI_5, "Raspberry Pi 500 Rev 1.0\0", "Raspberry Pi Compute Module 5 Rev 1.0\0"):
        board(tmp_path / model[:-1], model)
        assert isinstance(find_source(7, tmp_path / model[:-1], ask_pmic), Pmic)
    assert len(asked) == 3


@pytest.mark.parametrize(
    "answer",
    ["", "VCHI initialization failed\n", "EXT5V_V volt(24)=5.1V\n", "A_A current(0)=1..2A\nA_V volt(1)=1V"]
    + [f"A_A current(0)={'9' * digits}A\nA_V volt(1)=5V" for digits in (9, 300, 400)],
)
def test_a_power_chip_that_tells_nothing_is_none(tmp_path: Path, answer: str) -> None:
    board(tmp_path, PI_5)
    assert find_source(None, tmp_path, lambda: answer) is None


def test_a_program_that_fails_is_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board(tmp_path, PI_5)
    program = tmp_path / "opt/vc/bin/vcgencmd"
    program.parent.mkdir(parents=True)
    assert find_source(None, tmp_path) is None
    for script, found in (("exit 1", False), (f"[ $1 = pmic_read_adc ] && echo '{ANSWER}'", True)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        assert isinstance(find_source(None, tmp_path), Pmic) == found


def test_the_program_is_the_systems_and_hears_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board(tmp_path, PI_5)
    ours, other = tmp_path / "usr/bin", tmp_path / "bin"
    for folder in (ours, other):
        folder.mkdir(parents=True)
        (folder / "vcgencmd").write_text(f"#!/bin/sh\nexport > {folder}/heard; echo '{ANSWER}'\n")
        (folder / "vcgencmd").chmod(0o700)
    monkeypatch.setenv("PATH", str(other))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert isinstance(find_source(None, tmp_path), Pmic)
    assert "sk-secret" not in (ours / "heard").read_text()
    assert not (other / "heard").exists()


def test_no_step_waits_for_the_power_chip() -> None:
    now, asked, aside = [0.0], [], []  # type: ignore[var-annotated]

    def ask() -> str:
        asked.append(now[0])
        if now[0] >= 3:
            raise OSError("it hangs")
        return ANSWER

    meter = EnergyMeter(Pmic(ask, lambda: now[0], aside.append))

    def step() -> None:
        meter.began(now[0])
        now[0] += 1
        meter.ended(now[0], 1.0)

    for _ in range(3):
        step()
        assert asked == [0.0]
        assert len(aside) == 1, "one at a time"
    aside.pop()()
    assert asked == [0.0, 3.0]
    assert meter.joules == pytest.approx(3 * (0.1 * 3.7 + 2 * 0.8))
    step()
    assert meter.joules is None
    assert not aside


def test_the_power_chip_is_asked_on_a_thread() -> None:
    now, asked = [0.0], threading.Event()
    engine, threads = threading.current_thread(), []

    def ask() -> str:
        threads.append(threading.current_thread())
        if len(threads) == 2:
            asked.set()
        return ANSWER

    source = Pmic(ask, lambda: now[0])
    now[0] = 1.0
    source.joules()
    assert asked.wait(30)
    assert threads[0] is engine
    assert threads[1] is not engine


def test_power_is_current_times_voltage_summed_between_readings() -> None:
    now = [0.0]
    answers = iter([ANSWER, ANSWER.replace("2.0000", "4.0000"), ANSWER, ANSWER])
    source = Pmic(lambda: next(answers), lambda: now[0], lambda work: work())
    watts = 0.1 * 3.7 + 2 * 0.8
    now[0] = 0.25  # too soon for another process
    assert source.joules() == pytest.approx(0.25 * watts)
    now[0] = 1.25  # asked, and heard when it is read again
    assert source.joules() == pytest.approx(1.25 * watts)
    now[0] = 2.25
    assert source.joules() == pytest.approx(2.25 * watts + 0.5 * 1.6)
    now[0] = 3.25
    assert source.joules() == pytest.approx(3.25 * watts + 2 * 0.5 * 1.6)


# --- whose they are --------------------------------------------------------------------------------------------------------


class Ten:
    """A machine that needs ten watts, idle or not."""

    def __init__(self) -> None:
        self.now, self.reads, self.broken = 0.0, 0, False

    def joules(self) -> float:
        self.reads += 1
        if self.broken:
            raise OSError("gone")
        return 10 * self.now


def steps(meter: EnergyMeter, source: Ten, number: int, seconds: float = 0.1) -> None:
    for _ in range(number):
        meter.began(source.now)
        source.now += seconds
        meter.ended(source.now, seconds)


def test_only_steps_cost_something_and_meters_are_seldom_read() -> None:
    source = Ten()
    meter = EnergyMeter(source)
    account = meter.open()
    for _ in range(3):
        steps(meter, source, 1000, 0.01)
        account.work_s += 5.0  # half of the rows
        told = meter.of(account, source.now)
        source.now += 3600  # idle
    assert told == pytest.approx(150)
    assert meter.joules == pytest.approx(300)
    assert source.reads < 70


def test_a_meter_that_fails_later_is_none() -> None:
    source = Ten()
    meter = EnergyMeter(source)
    account = meter.open()
    steps(meter, source, 3)
    source.broken = True
    steps(meter, source, 30)
    assert meter.joules is None
    assert meter.of(account, source.now) is None
    assert source.reads < 5


def core_of(watts: float | None, **options: object) -> EngineCore:
    """An engine whose clock goes on whenever it is read."""
    now = [0.0]

    def tick() -> float:
        now[0] += 0.01
        return now[0]

    meter = None if watts is None else EnergyMeter(Configured(watts, lambda: now[0]))
    return make_core(clock=tick, energy=meter, **options)


def answered(core: EngineCore) -> list[float | None]:
    """The joules of four requests, one of which comes later."""
    asked = [ask(core, prompt, max_tokens=20) for prompt in (30, 5, 6)]
    core.step()
    asked.append(ask(core, 9, max_tokens=20))
    run(core)
    return [one.finished.timings.joules for one in asked]


def test_the_parts_of_all_requests_are_the_whole() -> None:
    core = core_of(10, slots=4)
    parts = answered(core)
    told = core.statistics()
    assert sum(parts) == pytest.approx(told.energy_joules, rel=0.1)
    assert parts[0] > parts[1] > 0  # a longer prompt
    assert told.energy_joules >= 10 * 0.01 * told.num_steps
    assert told.joules_per_token == told.energy_joules / 80


def test_where_nobody_tells_nothing_is_told() -> None:
    core = core_of(None, slots=4)
    assert answered(core) == [None] * 4
    assert core.statistics().energy_joules is None
    assert core.statistics().joules_per_token is None


def test_who_never_ran_has_taken_nothing() -> None:
    core = core_of(10, slots=1)
    ask(core, 5, max_tokens=3)
    waiting = ask(core, 6, max_tokens=3)
    core.step()
    waiting.sequence.cancel()
    run(core)
    assert waiting.finished.timings.joules is None


def test_joules_go_on_after_parking() -> None:
    core = core_of(10, slots=1, spare=1)
    batch = ask(core, 40, max_tokens=10, priority="batch")
    for _ in range(4):
        core.step()
    ask(core, 5, max_tokens=3)
    run(core)
    assert batch.sequence.preemptions == 1
    assert batch.finished.timings.joules > 0


def test_configured_watts_are_taken_by_the_clock() -> None:
    assert Configured(7, lambda: 3.0).joules() == 21
