"""A Raspberry Pi that qemu-user emulates: a Debian sysroot, our dependencies' aarch64 wheels, a CPU.

Everything lies in one cache folder and is made once. No binfmt, chroot or namespace: qemu's -L leads the guest's opens into
the sysroot, also that of /proc/cpuinfo, from which ONNX Runtime and LLVM take the CPU's features.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEBIAN, PYTHON = "trixie", "3.13"
_GLIBCS = (34, 31, 28, 27, 26, 17)
"""manylinux tags that the release's C library satisfies"""
_TOOLS = {"qemu-aarch64-static": "qemu-user-static", "mmdebstrap": "mmdebstrap"}
_PACKAGES = "python3,libpython3-stdlib,libstdc++6,libgomp1"
_NOT_RUN = ("ruff", "mypy", "edge-llm[")
"""of the extra `test`: not needed in the guest"""


@dataclass(frozen=True)
class Board:
    """What the guest's /proc/cpuinfo and qemu must agree on."""

    cpu: str
    features: str
    part: str
    model: str
    lowering: str
    """the one that our kernels must choose there"""


BOARDS = {
    "pi5": Board(
        "cortex-a76",
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
        "0xd0b",
        "Raspberry Pi 5 Model B Rev 1.0",
        "neondot",
    ),
    "pi4": Board("cortex-a72", "fp asimd evtstrm crc32 cpuid", "0xd08", "Raspberry Pi 4 Model B Rev 1.4", "neon"),
}


class MissingToolError(Exception):
    """A program of the host is not there."""


class Machine:
    """Runs the guest's Python. The wrapper `python` does so too, for programs that start `sys.executable`."""

    def __init__(self, name: str, cache: Path) -> None:
        """Makes what `cache` does not hold yet. Raises `MissingToolError`."""
        missing = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
        if missing:
            raise MissingToolError(f"{' and '.join(missing)} missing: apt-get install {' '.join(missing)}")
        self.board = BOARDS[name]
        cache.mkdir(parents=True, exist_ok=True)
        self.home = cache / name
        sysroot, site = _make_sysroot(cache), _make_site(cache)
        self.python = _make_wrapper(cache, name, self.board, sysroot)
        paths = [self.python.parent / "site", site, ROOT, ROOT / "apps"]
        kernels = self.home / "home/cache/kernels"  # compiled once, by whatever needs them first
        kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._environment = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONPYCACHEPREFIX": str(cache / "pycache"),
            "EDGE_LLM_HOME": str(self.home / "home"),
            "EDGE_LLM_TEST_KERNELS": str(kernels),
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The guest's Python with `arguments`, in the repository. Its stdout is kept."""
        environment = {**os.environ, **self._environment}
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """The folder `target`, made under another name first, so that a run cut short leaves nothing that looks whole."""
    if not target.is_dir():
        draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        shutil.rmtree(draft, ignore_errors=True)
        make(draft)
        draft.rename(target)
    return target


def _make_sysroot(cache: Path) -> Path:
    def make(draft: Path) -> None:
        print(f"making a sysroot of Debian {DEBIAN}", file=sys.stderr)
        command = ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=arm64", f"--include={_PACKAGES}"]
        subprocess.run([*command, DEBIAN, str(draft)], check=True)
        if not (draft / "lib").exists():  # a package's script makes it, and none is run
            (draft / "lib").symlink_to("usr/lib")

    return _once(cache / f"sysroot-{DEBIAN}", make)


def _make_site(cache: Path) -> Path:
    """The dependencies of our project and its tests, as aarch64 wheels: a folder for PYTHONPATH."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = [line for line in project["optional-dependencies"]["test"] if not line.startswith(_NOT_RUN)]
    wanted = [*project["dependencies"], *tests]
    tags = [f"manylinux_2_{minor}_aarch64" for minor in _GLIBCS] + ["manylinux2014_aarch64"]
    target = [
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        *(part for tag in tags for part in ("--platform", tag)),
    ]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]

    def make(draft: Path) -> None:
        print("fetching the wheels", file=sys.stderr)
        wheels = draft / "wheels"
        subprocess.run([*pip, "download", "--dest", str(wheels), *target, *wanted], check=True)
        install = [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--ignore-requires-python", "--target"]
        files = [str(wheel) for wheel in sorted(wheels.glob("*.whl"))]
        subprocess.run([*install, str(draft / "site"), *target, *files], check=True)
        shutil.rmtree(wheels)

    digest = hashlib.blake2b("\n".join([PYTHON, *wanted]).encode(), digest_size=6).hexdigest()
    return _once(cache / f"wheels-{digest}", make) / "site"


def _make_wrapper(cache: Path, name: str, board: Board, sysroot: Path) -> Path:
    """A program that is the guest's Python, in a folder with its view of the sysroot."""
    folder = cache / name
    root = _once(folder / f"root-{DEBIAN}", lambda draft: _link_sysroot(sysroot, draft))
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text(_cpuinfo(board))
    (folder / "site").mkdir(exist_ok=True)
    python = folder / "python"
    # Where no binfmt is registered the kernel cannot run the guest's own executable.
    (folder / "site/sitecustomize.py").write_text(f"import sys\nsys.executable = {str(python)!r}\n")
    qemu = ["nice", "-n", "10", "qemu-aarch64-static", "-cpu", board.cpu, "-L", str(root)]
    python.write_text(f'#!/bin/sh\nexec {shlex.join([*qemu, f"{root}/usr/bin/python{PYTHON}"])} "$@"\n')
    python.chmod(0o755)
    return python


def _link_sysroot(sysroot: Path, draft: Path) -> None:
    """A copy whose files are the same: each board has its own /proc/cpuinfo."""
    draft.parent.mkdir(exist_ok=True)
    shutil.copytree(sysroot, draft, symlinks=True, copy_function=os.link)


def _cpuinfo(board: Board) -> str:
    cores = [
        f"processor\t: {i}\nBogoMIPS\t: 108.00\nFeatures\t: {board.features}\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {board.part}\nCPU revision\t: 3\n\n"
        for i in range(4)
    ]
    return "".join(cores) + f"Model\t\t: {board.model}\n"
