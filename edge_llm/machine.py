"""What this machine gives the process: CPUs and memory.

A missing or unreadable /proc or /sys costs precision, never an error.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path("/")
_CPU_MODEL = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU architecture", "CPU part")
_PR_SET_PDEATHSIG = 1
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def usable_cpus() -> frozenset[int]:
    """Numbers of the logical CPUs that the scheduler may give us (affinity mask, cpuset); never empty."""
    try:
        return frozenset(os.sched_getaffinity(0)) or frozenset({0})
    except (AttributeError, OSError):  # not every system has a mask
        return frozenset(range(os.cpu_count() or 1))


def board(root: Path = ROOT) -> str:
    """What a small computer calls itself; empty where nobody says."""
    return _text(root / "proc/device-tree/model").strip(" \0\n")


def physical_cores(cpus: Collection[int], root: Path = ROOT) -> int:
    """How many physical cores the logical CPUs `cpus` belong to; a CPU whose siblings are unknown counts as a core."""
    cores = {_siblings(cpu, root) for cpu in cpus}
    return max(1, len(cores))


def return_freed_memory() -> None:
    """Give the system what the C library keeps of memory that was freed, where it can (glibc)."""
    import ctypes  # not for every start: settings read this module too

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let Python's collector of cycles rest: what loading makes stays, and looking through it again and again takes time."""
    resting = not gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not resting:
            gc.enable()


def yield_address() -> int:
    """Address of the C function () by which a thread lets another one run; 0 where none is known."""
    import ctypes

    try:
        windows = os.name == "nt"
        function = ctypes.CDLL("kernel32").SwitchToThread if windows else ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def end_with_parent(*, at_once: bool) -> None:
    """From now on this process is killed when the thread that started it ends, or gets SIGTERM then. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if at_once else signal.SIGTERM)


_returning = threading.Lock()


def return_freed_memory_later(delay_s: float = 1.0) -> None:
    """As `return_freed_memory`, soon and once, however often this is called meanwhile: the caller still holds what is to go."""
    if not _returning.acquire(blocking=False):
        return

    def give_back() -> None:
        _returning.release()
        return_freed_memory()

    timer = threading.Timer(delay_s, give_back)
    timer.daemon = True
    timer.start()


def cpu_identity(root: Path = ROOT) -> str | None:
    """Model and features of the CPU as Linux tells them, or None: two machines of one identity run the same code."""
    lines = _text(root / "proc/cpuinfo").split("\n\n", 1)[0].splitlines()
    said = dict(line.partition(":")[::2] for line in lines)
    told = {key.strip(): value.strip() for key, value in said.items()}
    features = told.get("flags") or told.get("Features")
    if not features:
        return None
    model = [told.get(key, "") for key in _CPU_MODEL]
    return " ".join([*model, features])


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs that the control group (v1 or v2) pays for, or None without a limit."""
    quotas = []
    for folder in _control_groups("cpu", root):
        words = _text(folder / "cpu.max").split()
        if len(words) != 2:
            words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        limit, period = words
        if limit.isdecimal() and period.isdecimal() and int(period) > 0:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that can be taken without swapping, within the control group's limit; None where nobody says."""
    rooms = []
    for line in _text(root / "proc/meminfo").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "MemAvailable:" and words[1].isdecimal():
            rooms.append(int(words[1]) * 1024)
    for folder in _control_groups("memory", root):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
            if limit.isdecimal() and usage.isdecimal() and int(limit) < _UNLIMITED:
                rooms.append(max(0, int(limit) - int(usage) + _cached_files(folder)))
    return min(rooms, default=None)


def resident_memory(root: Path = ROOT) -> int | None:
    """Bytes of memory that this process holds, mapped files among them; None where nobody says."""
    words = _text(root / "proc/self/statm").split()
    return int(words[1]) * mmap.PAGESIZE if len(words) > 1 and words[1].isdecimal() else None


def waited_for_cpu(root: Path = ROOT) -> float | None:
    """Seconds that this process's first thread could have run and did not, since other programs did; None where nobody says."""
    words = _text(root / "proc/self/schedstat").split()
    return int(words[1]) / 1e9 if len(words) > 1 and words[1].isdecimal() else None


def _siblings(cpu: int, root: Path) -> str:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        if text := _text(topology / name).strip():
            return text
    return str(cpu)


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of our control group and its parents: a limit of any of them binds.

    In a container often only the top one is visible, whatever path /proc names.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            if not _is_dir(mount):
                mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = Path(path.lstrip("/"))
        if ".." in folder.parts:  # a group outside of our namespace
            folder = Path()
        yield from (mount / part for part in (folder, *folder.parents))


def _cached_files(group: Path) -> int:
    """Bytes of a control group's usage that are old file pages: dropped as soon as somebody needs the memory."""
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            return int(value)
    return 0


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
