"""ONNX Runtime's library does what it is asked and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_llm.errors import SessionError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model import custom_ops, ort_capi
from tests.model.test_session import opened

CHILD = """
import sys, threading
from pathlib import Path
from edge_llm import Engine, EngineConfig, SamplingParams
with Engine.open(Path(sys.argv[1]), EngineConfig(context=128)) as engine:
    engine.complete("Hello", SamplingParams(max_tokens=3)).text()
    import onnxruntime
"""

FORKED = """
import os, sys, time
from pathlib import Path
from edge_llm import Engine, EngineConfig
engine = Engine.open(Path(sys.argv[1]), EngineConfig(context=128))
child = os.fork()
if child == 0:
    sys.exit(0)
for _ in range(300):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        print(os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
engine.close()
"""


def test_it_writes_nothing_into_the_home(tiny_folder: Path, kernels: KernelLibrary, tmp_path: Path) -> None:
    """No device id, no telemetry database."""
    environment = {key: value for key, value in os.environ.items() if key not in ("ORT_DISABLE_TELEMETRY",)}
    environment = {k: v for k, v in environment.items() if not k.startswith("XDG_")} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", CHILD, str(tiny_folder)], env=environment, check=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_forked_child_exits(tiny_folder: Path, kernels: KernelLibrary) -> None:
    """It would wait for ever for a thread of telemetry that only the parent has."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(tiny_folder)], capture_output=True, text=True, check=True
    )
    assert result.stdout == "0\n"


def test_what_a_callback_raises_reaches_the_caller(
    tiny_folder: Path, kernels: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may strike while ONNX Runtime is creating an op."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    specs = [custom_ops.OpSpec(**{**vars(spec), "fill": interrupted}) for spec in custom_ops.SPECS]
    monkeypatch.setattr(custom_ops, "SPECS", specs)
    with pytest.raises(KeyboardInterrupt), opened(tiny_folder, kernels):
        pass


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_capi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SessionError, match="not installed"):
        ort_capi.library_path()


@pytest.mark.parametrize(
    ("version", "release"), [("1.32.0", (1, 32)), ("1.30.1", (1, 30)), ("2.0", (2, 0)), ("x", (0, 0)), ("", (0, 0))]
)
def test_versions(version: str, release: tuple[int, int]) -> None:
    assert ort_capi._release(version) == release
