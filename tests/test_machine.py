"""What /proc says: of the CPU, as far as compiled code depends on it, and of the memory that a process holds."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edge_llm import machine
from edge_llm.machine import cpu_identity, resident_memory, return_freed_memory, waited_for_cpu

INTEL = """processor\t: {number}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
stepping\t: 8
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse2 avx2 {more}

"""
PI5 = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n\n"


def identity(root: Path, text: str) -> str | None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text(text)
    return cpu_identity(root)


def test_identity_is_model_and_features_and_nothing_that_changes(tmp_path: Path) -> None:
    first = identity(tmp_path, INTEL.format(number=0, mhz=2000, more="") + INTEL.format(number=1, mhz=2100, more=""))
    assert first == identity(tmp_path, INTEL.format(number=0, mhz=3500, more=""))
    assert first != identity(tmp_path, INTEL.format(number=0, mhz=2000, more="avx512f"))
    assert first is not None
    assert "143" in first.split()


def test_arm_is_told_by_its_part_and_features(tmp_path: Path) -> None:
    said = identity(tmp_path, PI5)
    assert said is not None
    assert {"0xd0b", "asimddp"} <= set(said.split())
    assert said != identity(tmp_path, PI5.replace(" asimddp", ""))


def test_nothing_is_made_up(tmp_path: Path) -> None:
    assert cpu_identity(tmp_path) is None
    assert identity(tmp_path, "processor\t: 0\n\n") is None


def test_resident_memory_is_pages_or_unknown(tmp_path: Path) -> None:
    assert resident_memory(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    for text, told in (("90 7 3 1 0 9 0\n", 7 * mmap.PAGESIZE), ("90 what", None), ("", None)):
        (tmp_path / "proc/self/statm").write_text(text)
        assert resident_memory(tmp_path) == told


def test_freed_memory_can_be_returned_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    return_freed_memory()

    def no_library(name: str | None) -> None:
        raise OSError(f"{name} cannot be loaded")

    monkeypatch.setattr("ctypes.CDLL", no_library)
    return_freed_memory()


def test_freed_memory_is_returned_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    done = threading.Event()

    def give_back() -> None:
        calls.append(None)
        done.set()

    monkeypatch.setattr(machine, "return_freed_memory", give_back)
    for _ in range(50):
        machine.return_freed_memory_later(0.2)
    assert done.wait(20)
    assert len(calls) == 1
    done.clear()
    machine.return_freed_memory_later(0.0)
    assert done.wait(20)


def test_time_that_a_thread_waited_for_a_cpu(tmp_path: Path) -> None:
    assert waited_for_cpu(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    for text, told in (("5 2500000000 7\n", 2.5), ("5 what", None), ("", None)):
        (tmp_path / "proc/self/schedstat").write_text(text)
        assert waited_for_cpu(tmp_path) == told


CHILD = """
import signal, sys, time
from edge_llm import machine
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("told")))
machine.end_with_parent(at_once={at_once})
print("ready", flush=True)
time.sleep(1000)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's doing")
@pytest.mark.parametrize("at_once", [True, False])
def test_a_process_ends_with_its_parent(at_once: bool) -> None:
    child = CHILD.format(at_once=at_once)
    with subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == ("" if at_once else "told\n")  # until nobody has it any more


def test_collections_go_on_as_they_were() -> None:
    with machine.without_collections():
        assert not gc.isenabled()
        with machine.without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
