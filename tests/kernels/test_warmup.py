"""The kept object code is used when it fits and is a miss when it does not; a start never fails for its sake."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_llm.errors import KernelError
from edge_llm.kernels import warmup

FILE = "kernels.bin"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the compiled entries of one small module."""
    home, digest = tmp_path_factory.mktemp("kernels"), "0" * 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "ENTRY_MODULES", ("elementwise",))
        patch.setenv("EDGE_LLM_HOME", str(home))
        library = warmup._compile(digest, None)
        assert (library.from_cache, library.notice) == (False, "")
        yield home / "cache" / "kernels" / digest


def normalise(library: warmup.KernelLibrary) -> np.ndarray:
    """Run an entry by its address."""
    from edge_llm.kernels.layout import CALL_FIELDS, NormCall

    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    gamma = np.ones(32, np.float32)
    call = np.zeros(CALL_FIELDS, np.int64)
    for field, value in {
        NormCall.X: x.ctypes.data,
        NormCall.OUT: out.ctypes.data,
        NormCall.GAMMA: gamma.ctypes.data,
        NormCall.ROWS: 1,
        NormCall.WIDTH: 32,
        NormCall.GROUP: 32,
        NormCall.EPS: np.float64(1e-5).view(np.int64),
    }.items():
        call[field] = value
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(library.address("norm_row"))(call.ctypes.data, 0)
    return out


def test_loaded_code_computes(kept: Path) -> None:
    library = warmup._load(kept)
    assert library is not None
    assert library.from_cache
    x = np.arange(32)
    assert normalise(library) == pytest.approx(x / np.sqrt((x**2).mean() + 1e-5), rel=1e-5)


def test_an_unknown_kernel_is_named(kept: Path) -> None:
    library = warmup._load(kept)
    assert library is not None
    with pytest.raises(KernelError, match="'nothing'"):
        library.address("nothing")


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_code_that_others_may_change_is_a_miss(kept: Path, tmp_path: Path) -> None:
    """Though its folder is ours: one that others may look into lets them open what is in it."""
    (tmp_path / FILE).write_bytes((kept / FILE).read_bytes())
    (tmp_path / FILE).chmod(0o644)
    assert warmup._load(tmp_path) is not None
    (tmp_path / FILE).chmod(0o646)
    assert warmup._load(tmp_path) is None


@pytest.mark.parametrize("damage", ["empty", "half", "flip first", "flip middle", "flip last", "longer", "missing"])
def test_damaged_code_is_a_miss(kept: Path, tmp_path: Path, damage: str) -> None:
    data = bytearray((kept / FILE).read_bytes())
    places = {"flip first": 0, "flip middle": len(data) // 2, "flip last": len(data) - 1}
    if damage in places:
        data[places[damage]] ^= 1
    elif damage == "empty":
        data.clear()
    elif damage == "half":
        del data[len(data) // 2 :]
    elif damage == "longer":
        data += b"x"
    if damage != "missing":
        (tmp_path / FILE).write_bytes(data)
    assert warmup._load(tmp_path) is None


@pytest.mark.parametrize(
    "header",
    [[], {}, {"sizes": []}, {"sizes": ["a"], "symbols": {}}, {"sizes": [], "symbols": {}}, {"sizes": [1]}],
    ids=str,
)
def test_a_sound_digest_over_nonsense_is_a_miss(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text
    (tmp_path / FILE).write_bytes(warmup._MAGIC + hashlib.blake2b(body, digest_size=32).digest() + body)
    assert warmup._load(tmp_path) is None


def test_temporaries_of_the_dead_are_swept(tmp_path: Path) -> None:
    """B27: also in the folders of other versions, which may never write again."""
    own, other, foreign = (tmp_path / name for name in ("0" * 32, "1" * 32, "of somebody else"))
    for folder in (own, other, foreign):
        folder.mkdir()
        for name, age in (("dead", 1e5), ("alive", 0)):
            (folder / name).write_bytes(b"x")
            os.utime(folder / name, (time.time() - age, time.time() - age))
    warmup._store(own, [b"code"], {})
    assert sorted(path.name for path in own.iterdir()) == ["alive", FILE]
    assert [path.name for path in other.iterdir()] == ["alive"]
    assert len(list(foreign.iterdir())) == 2


def test_old_libraries_are_swept(tmp_path: Path) -> None:
    names = [f"{i:032x}" for i in range(8)]
    for i, name in enumerate([*names, "of somebody else"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (i, i))
    warmup._sweep(tmp_path / names[0])
    assert {path.name for path in tmp_path.iterdir()} == {names[0], *names[4:], "of somebody else"}


# What a start must survive (known faults B30): each with one notice at most, and the same code.
ENVIRONMENTS = {
    "no home": {"HOME": "/nonexistent"},
    "a file as home": {"EDGE_LLM_HOME": "{file}"},
    "a home that others may write to": {"EDGE_LLM_HOME": "{open}"},
}

SCRIPT = """
from edge_llm.kernels import warmup
warmup.ENTRY_MODULES = ("elementwise",)
library = warmup.load_kernels()
assert library.address("norm_row") > 0
print(int(library.from_cache), library.notice)
"""


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_a_folder_that_cannot_be_used_costs_a_notice(case: str, tmp_path: Path) -> None:
    """A folder among the temporary files takes its place, also for the next start; without it each start compiles."""
    (tmp_path / "file").write_text("")
    (tmp_path / "open" / "cache").mkdir(parents=True)
    (tmp_path / "open" / "cache").chmod(0o777)
    (tmp_path / "temporary").mkdir()
    places = {"file": str(tmp_path / "file"), "open": str(tmp_path / "open")}
    environment = {k: v for k, v in os.environ.items() if k not in ("EDGE_LLM_HOME", "XDG_CACHE_HOME")}
    environment |= {key: value.format(**places) for key, value in ENVIRONMENTS[case].items()}
    environment |= {"TMPDIR": str(tmp_path / "temporary")}
    if case == "no home" and os.geteuid() == 0:
        environment |= {"XDG_CACHE_HOME": "/proc/nonexistent"}  # root may create any folder but this

    def start() -> list[str]:
        command = [sys.executable, "-c", SCRIPT]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        assert result.stderr == ""
        return result.stdout.split(maxsplit=1)

    instead = tmp_path / "temporary" / f"edge-llm-{os.geteuid()}"
    compiled, notice = start()
    assert (compiled, notice.startswith(f"compiled kernels are kept in {instead}/cache/kernels: ")) == ("0", True)
    assert start()[0] == "1"
    instead.chmod(0o777)
    again, notice = start()
    assert (again, notice.startswith("compiled kernels are not kept")) == ("0", True)
