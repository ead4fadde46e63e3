"""Energy: joules that steps take, as the machine's own meters tell, or by a number of watts from the config.

    RAPL      counters of Intel's and AMD's CPUs under /sys/class/powercap; most systems let only root read them
    PMIC      currents and voltages of a Raspberry Pi 5's power chip, which `vcgencmd pmic_read_adc` tells
    config    `watts`, for as long as steps take

Meters tell of the whole machine: what other programs need meanwhile is in it. They are read while steps are made: what
a machine needs between answers is nobody's.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from edge_llm import machine

_READ_EVERY_S = 0.5
_IDLE_S = 0.1
"""seconds without a step after which what was used is nobody's"""
_PMIC = ("usr/bin/vcgencmd", "opt/vc/bin/vcgencmd")
_MOST_WATTS = 10_000
_COUNTER_BITS = 64
_TIMEOUT_S = 1.0
_BOARDS = ("Raspberry Pi 5", "Raspberry Pi Compute Module 5")
_ADC = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=([0-9.]+)[AV]\s*$", re.MULTILINE)


class Source(Protocol):
    """A meter."""

    def joules(self) -> float:
        """What was used since some moment; grows. Raises `OSError` or `ValueError` if it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Configured:
    """So many watts."""

    watts: float
    clock: Callable[[], float] = time.perf_counter

    def joules(self) -> float:
        return self.watts * self.clock()


class Rapl:
    """Counters of the CPU's packages and of the memory that is metered beside them."""

    def __init__(self, root: Path = machine.ROOT) -> None:
        """Raises `OSError` or `ValueError` if there is none, or none that this process may read."""
        zones = [zone for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")) if _counts(zone)]
        if not zones:
            raise ValueError("no package has a counter")
        self._last = {zone: _microjoules(zone / "energy_uj") for zone in zones}
        self._sum = 0

    def joules(self) -> float:
        for zone, last in self._last.items():
            value = _microjoules(zone / "energy_uj")
            around = 0 if value >= last else _microjoules(zone / "max_energy_range_uj")  # it went back to 0 meanwhile
            self._sum += value - last + around
            self._last[zone] = value
        return self._sum / 1e6


def _counts(zone: Path) -> bool:
    """Whether a zone is a package or its memory: cores and graphics are parts of a package, `psys` is more than all of them."""
    name = (zone / "name").read_text(encoding="ascii", errors="replace").strip()
    return name.startswith("package") or name == "dram"


def _microjoules(counter: Path) -> int:
    value = int(counter.read_text(encoding="ascii"))
    if not 0 <= value < 1 << _COUNTER_BITS:
        raise ValueError("no counter of the kernel's tells such a number")
    return value


class Pmic:
    """What a power chip measures, as power at the moments of reading, and between two of them in a straight line.

    Asking is a process, which may hang, and a step waits for nobody: what it tells counts when it has come.
    """

    def __init__(
        self,
        ask: Callable[[], str],
        clock: Callable[[], float] = time.perf_counter,
        aside: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`ask` gives the chip's answer; `aside` calls what it is given without waiting for it, else a thread does.

        Raises `OSError` or `ValueError` if the chip tells of no power.
        """
        self._ask, self._clock, self._aside = ask, clock, aside or _on_thread
        self._told: float | Exception = _watts(ask())
        self._watts, self._sum, self._asking = self._told, 0.0, False
        self._at = self._asked = clock()

    def joules(self) -> float:
        now, before, told = self._clock(), self._watts, self._told
        if isinstance(told, Exception):
            raise OSError(str(told)) from told
        self._watts = told
        self._sum += (before + told) / 2 * (now - self._at)
        self._at = now
        if now - self._asked >= _READ_EVERY_S and not self._asking:
            self._asked, self._asking = now, True
            self._aside(self._hear)
        return self._sum

    def _hear(self) -> None:
        try:
            self._told = _watts(self._ask())
        except (OSError, ValueError) as error:
            self._told = error
        self._asking = False


def _on_thread(work: Callable[[], None]) -> None:
    """Raises `OSError` if the system has no thread."""
    try:
        threading.Thread(target=work, name="edge-llm energy", daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _watts(answer: str) -> float:
    """Current times voltage of each rail that has both."""
    told: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for rail, unit, value in _ADC.findall(answer):
        told[unit][rail] = float(value)
    rails = told["A"].keys() & told["V"].keys()
    if not rails:
        raise ValueError("no rail has a current and a voltage")
    watts = sum(told["A"][rail] * told["V"][rail] for rail in rails)
    if not watts < _MOST_WATTS:
        raise ValueError("no board needs so much")
    return watts


def _ask_pmic(root: Path) -> str:
    """Runs the program from where the system keeps it, whatever PATH says; it hears nothing of our environment."""
    import subprocess  # on a Pi 5 only

    nothing = subprocess.DEVNULL
    program = next((root / path for path in _PMIC if (root / path).is_file()), root / _PMIC[0])
    try:
        told = subprocess.check_output(
            [program, "pmic_read_adc"], stdin=nothing, stderr=nothing, timeout=_TIMEOUT_S, env={"LC_ALL": "C"}
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    return told.decode("ascii", errors="replace")


def find_source(
    watts: float | None, root: Path = machine.ROOT, ask_pmic: Callable[[], str] | None = None
) -> Source | None:
    """What tells of this machine's energy, else `watts`; None where neither does."""
    try:
        return Rapl(root)
    except (OSError, ValueError):
        pass
    if any(name in machine.board(root) for name in _BOARDS):
        try:
            return Pmic(ask_pmic or partial(_ask_pmic, root))
        except (OSError, ValueError):
            pass
    return None if watts is None else Configured(watts)


@dataclass(slots=True)
class Account:
    """One request's part: seconds of steps by its rows among theirs, and where the meter stood when it began."""

    joules: float
    busy_s: float
    work_s: float = 0.0


class EnergyMeter:
    """What steps take, by `began` and `ended` around each, and whose it is. One thread; `joules` is for any."""

    def __init__(self, source: Source) -> None:
        self._source: Source | None = source
        self._mark: float | None = None
        """what the source told last; None after a pause"""
        self._read_at = self._step_ended = -math.inf
        self._busy_s = self._joules = 0.0

    @property
    def joules(self) -> float | None:
        """Of all steps; None if the source can no longer be read."""
        return None if self._source is None else self._joules

    def open(self) -> Account:
        """For a request that takes part in steps from now on."""
        return Account(self._joules, self._busy_s)

    def of(self, account: Account, now: float) -> float | None:
        """Joules of a request: as long as its part of the steps took, at what the machine needed in its time."""
        self._read(now)
        busy_s = self._busy_s - account.busy_s
        if self._source is None or busy_s <= 0:
            return None
        return (self._joules - account.joules) * account.work_s / busy_s

    def began(self, now: float) -> None:
        """A step begins."""
        if now - self._step_ended > _IDLE_S:
            self._mark = None
            self._read(now)

    def ended(self, now: float, seconds: float) -> None:
        """A step has taken so long."""
        self._step_ended = now
        self._busy_s += seconds
        if now - self._read_at >= _READ_EVERY_S:
            self._read(now)

    def _read(self, now: float) -> None:
        if self._source is None:
            return
        try:
            told = self._source.joules()
        except (OSError, ValueError):
            self._source = None
            return
        if self._mark is not None:
            self._joules += told - self._mark
        self._mark, self._read_at = told, now
