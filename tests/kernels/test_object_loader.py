"""Object code in memory without LLVM: it computes, and what is damaged or unknown is refused."""

from __future__ import annotations

import ctypes
import math
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.kernels.object_loader import LoadedCode

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="LLVM loads the code on other systems"
)


def outside(name: str) -> int:
    """What the code below needs from outside: `exp`; everything else stands in error paths that are never taken."""
    library = ctypes.CDLL("libm.so.6" if name == "exp" else None)
    return ctypes.cast(getattr(library, name if name == "exp" else "abort"), ctypes.c_void_p).value or 0


@pytest.fixture(scope="module")
def code() -> tuple[bytes, str]:
    """Object code of a function with constants, a table of them, a loop and a call, and its symbol."""
    import numba

    table = (1.5, 2.25, 4.125, 8.0625)

    def function(x: float, n: int) -> float:
        total = x * 0.3
        for i in range(n):
            total += math.exp(x) * table[i % 4]
        return total

    compiled = numba.cfunc("float64(float64, int64)")(function)
    return compiled._library._get_compiled_object(), compiled.native_name


def expected(x: float, n: int) -> float:
    return x * 0.3 + sum(math.exp(x) * (1.5, 2.25, 4.125, 8.0625)[i % 4] for i in range(n))


def test_loaded_code_computes(code: tuple[bytes, str]) -> None:
    data, symbol = code
    loaded = LoadedCode(
        [data, data], outside
    )  # two files that define the same names, as modules with a common helper do
    function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_int64)(loaded.symbols[symbol])
    for x, n in ((0.5, 0), (0.5, 7), (-2.0, 100)):
        assert function(x, n) == pytest.approx(expected(x, n), rel=1e-12)


def test_what_is_missing_outside_is_said(code: tuple[bytes, str]) -> None:
    def nothing(name: str) -> int:
        raise ValueError(f"no {name}")

    with pytest.raises(ValueError, match="no "):
        LoadedCode([code[0]], nothing)


@pytest.mark.parametrize("machine", [183, 3])
def test_another_cpu_is_refused(code: tuple[bytes, str], machine: int) -> None:
    data = bytearray(code[0])
    struct.pack_into("<H", data, 18, machine)
    with pytest.raises(ValueError, match="x86-64"):
        LoadedCode([bytes(data)], outside)


def test_an_unknown_relocation_is_refused(code: tuple[bytes, str]) -> None:
    """R_X86_64_GOTPCREL in place of the first R_X86_64_64."""
    data = bytearray(code[0])
    (table,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]
    relocations = next(header for header in headers if header[1] == 4)
    struct.pack_into("<I", data, relocations[4] + 8, 9)
    with pytest.raises(ValueError, match="relocation 9"):
        LoadedCode([bytes(data)], outside)


@given(st.data())
@settings(max_examples=400)
def test_damaged_code_loads_or_is_refused(code: tuple[bytes, str], data: st.DataObject) -> None:
    """The file's digest is checked before; still, nothing but `ValueError` and `OSError` may come of damage."""
    damaged = bytearray(code[0])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    cut = damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged
    try:
        loaded = LoadedCode([bytes(cut)], outside)
    except (ValueError, OSError):
        return
    assert isinstance(loaded.symbols, dict)


def test_a_start_needs_neither_numba_nor_llvm(tmp_path: Path) -> None:
    script = """
import sys
from edge_llm.kernels import warmup
warmup.ENTRY_MODULES = ("elementwise",)
library = warmup.load_kernels()
print(library.from_cache, library.address("norm_row") > 0, bool({"numba", "llvmlite"} & sys.modules.keys()))
"""
    environment = {"EDGE_LLM_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert [line.split() for line in said] == [["False", "True", "True"], ["True", "True", "False"]]
