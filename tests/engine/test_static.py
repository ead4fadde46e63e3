"""The static layout's own: it runs by itself where the ring's kernels cannot be had, and what becomes of providers that fail.

What it shares with the ring: test_layout_contract.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.engine import Engine
from edge_llm.engine.request import Request
from edge_llm.errors import GenerationError, KernelError, ParameterError, SessionError, StorageError
from edge_llm.export import static_export
from edge_llm.export.device_rules import RULES
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished
from edge_llm.model.manifest import ModelManifest, RopeTable
from edge_llm.model.plugins import PLUGINS, forget_compiled
from edge_llm.model.static_folder import StaticForm
from edge_llm.model.static_session import self_test
from edge_llm.sampling.params import SamplingParams
from tests.model.static_rig import emulated_hexagon

needs_openvino = pytest.mark.skipif(
    find_spec(PLUGINS["openvino"].package) is None, reason="onnxruntime-ep-openvino (extra npu) is not installed"
)
CONFIG = EngineConfig(layout="static", context=256, slots=4, max_chunk=64, mixed_chunk=16)
PROMPTS = ["Paris is the capital of France. " * (1 + i) for i in range(4)]
SAMPLED = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path, kernels: KernelLibrary) -> Iterator[Engine]:
    with Engine.open(tiny_folder, CONFIG) as made:
        yield made


def ids(engine: Engine, prompt: str, params: SamplingParams = SAMPLED, **options: object) -> tuple[int, ...]:
    handle = engine.complete(prompt, params, **options)  # type: ignore[arg-type]
    handle.text()
    assert handle.finished is not None
    return handle.finished.token_ids


def test_it_says_what_it_is(engine: Engine) -> None:
    assert (engine.info.layout, engine.info.provider, engine.info.kv_type) == ("static", "cpu", "f32")
    assert engine.info.notice == ""


def test_rows_that_are_no_numbers_never_reach_the_next_request(tiny_folder: Path, engine: Engine) -> None:
    """Masks are added to scores here, which hides no NaN, and float16 on a device may overflow."""
    expected, runs = ids(engine, PROMPTS[2]), 0
    core = open_engine(tiny_folder, CONFIG.with_options(slots=1))
    real = core.session._graph.run

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        nonlocal runs
        runs += 1
        outputs = real(inputs)
        return {name: np.full_like(output, np.nan) for name, output in outputs.items()} if runs == 6 else outputs

    core.session._graph.run = run
    ends: list[object] = []
    for _ in range(2):
        core.enqueue(core.prepare(Request.completion(PROMPTS[2], SAMPLED), ends.append))
        while core.has_work:
            core.step()
    core.close()
    (failure,) = [end for end in ends if isinstance(end, GenerationError)]
    assert "not finite" in str(failure)
    assert isinstance(ends[-1], Finished)
    assert ends[-1].token_ids == expected


def test_kernels_that_do_not_compile_are_done_without(
    tiny_folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(progress: object) -> KernelLibrary:
        raise KernelError("no compiler here")

    expected = ids(engine, PROMPTS[1])
    monkeypatch.setattr("edge_llm.engine.assembly.load_kernels", fail)
    with Engine.open(tiny_folder, CONFIG.with_options(layout="auto")) as plain:
        assert plain.info.layout == "static"
        assert plain.info.notice == "the fast kernels do not run here, slower stock ops do: no compiler here"
        assert ids(plain, PROMPTS[1]) == expected  # sampled without compiled code too
    with pytest.raises(KernelError, match="no compiler"):
        Engine.open(tiny_folder, CONFIG.with_options(layout="ring"))


def test_a_library_that_refuses_our_ops_is_done_without(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SessionError("ONNX Runtime's library is too old")

    monkeypatch.setattr("edge_llm.engine.assembly.Session", refuse)
    with Engine.open(tiny_folder, CONFIG.with_options(layout="auto")) as plain:
        assert "too old" in plain.info.notice
        assert ids(plain, "Hello")


def test_a_machine_without_numba_answers(tiny_folder: Path, tmp_path: Path) -> None:
    """No numba, no llvmlite, no object code that was kept."""
    program = f"""
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
from pathlib import Path
from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.engine import Engine
from edge_llm.engine.request import Request
from edge_llm.sampling.params import SamplingParams
with Engine.open(Path({str(tiny_folder)!r}), EngineConfig(context=128)) as engine:
    handle = engine.complete("Hello", SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    handle.text()
    print(engine.info.layout, handle.finished.usage.completion_tokens)
    print(engine.info.notice)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "EDGE_LLM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, notice = done.stdout.splitlines()
    assert first == "static 5"
    assert notice.startswith("the fast kernels do not run here, slower stock ops do: the kernels cannot be compiled")


def test_a_form_is_written_once_and_again_when_damaged(tiny_folder: Path, engine: Engine) -> None:
    (form,) = [path for path in static_export.static_root().iterdir() if path.name == _form_of(tiny_folder)]
    graph = form / "static.onnx"
    written = graph.stat().st_mtime_ns
    Engine.open(tiny_folder, CONFIG).close()
    assert graph.stat().st_mtime_ns == written
    graph.write_bytes(b"")
    stages: list[str] = []
    with Engine.open(tiny_folder, CONFIG, progress=lambda stage, done, total: stages.append(stage)) as again:
        assert ids(again, PROMPTS[0]) == ids(engine, PROMPTS[0])
    assert static_export.STAGE in stages


def test_a_damaged_form_of_the_same_size_is_written_again(tiny_folder: Path, engine: Engine) -> None:
    """What is known of the form when it was whole does not count: its file has changed since."""
    form = static_export.static_root() / _form_of(tiny_folder)
    weights = form / "static.bin"
    written = weights.read_bytes()
    (form / "damaged").write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    (form / "damaged").replace(weights)  # the open engine reads the old one
    with Engine.open(tiny_folder, CONFIG) as again:
        assert ids(again, PROMPTS[0]) == ids(engine, PROMPTS[0])
    assert weights.read_bytes() == written


def test_forms_are_of_one_shape(tiny_folder: Path) -> None:
    """A manifest that says something else of the same weights has a form of its own."""
    manifest = ModelManifest.read(tiny_folder)
    other = replace(manifest, rope=(RopeTable(500.0, manifest.rope[0].rotary_dim),))
    assert static_export._name(other, static_export.StaticForm.BLOCKS) != _form_of(tiny_folder)


def _form_of(folder: Path) -> str:
    return static_export._name(ModelManifest.read(folder), static_export.StaticForm.BLOCKS)


def test_a_disk_that_takes_nothing_is_told(
    tiny_folder: Path, tmp_path: Path, kernels: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path))
    monkeypatch.setattr(static_export, "export_static", full)
    with pytest.raises(StorageError, match="No space left"):
        Engine.open(tiny_folder, CONFIG)
    assert not list(static_export.static_root().iterdir())


def test_a_provider_that_cannot_be_had_is_told_and_the_ring_runs(
    tiny_folder: Path, kernels: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_llm.model.plugins.find_spec", lambda _: None)
    with Engine.open(tiny_folder, EngineConfig(provider="openvino")) as engine:
        assert (engine.info.layout, engine.info.provider) == ("ring", "cpu")
        assert engine.info.notice == (
            "the CPU computes, not openvino: openvino is not installed (pip install 'edge-llm[npu]')"
        )
        assert ids(engine, "Hello")


@needs_openvino
def test_openvino_answers(tiny_folder: Path) -> None:
    config = CONFIG.with_options(layout="auto", provider="openvino", speculation="lookup")
    with Engine.open(tiny_folder, config) as engine:
        assert (engine.info.layout, engine.info.provider, engine.info.notice) == ("static", "openvino", "")
        alone = ids(engine, PROMPTS[2])
        assert len(alone) == 16
        assert ids(engine, PROMPTS[2]) == alone


@pytest.mark.skipif(find_spec(PLUGINS["qnn"].package) is None, reason="onnxruntime-qnn is not installed")
def test_an_emulated_npu_answers(tiny_folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are float16's, so the tokens are those of the CPU where these are sure."""
    monkeypatch.setitem(PLUGINS, "qnn", emulated_hexagon())
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    config = CONFIG.with_options(layout="auto", provider="qnn", context=64)
    with Engine.open(tiny_folder, config) as emulated:
        assert (emulated.info.layout, emulated.info.provider, emulated.info.notice) == ("static", "qnn", "")
        assert ids(emulated, "Paris", greedy) == ids(engine, "Paris", greedy)


def test_a_model_that_a_provider_cannot_take_runs_in_the_ring(
    tiny_folder: Path, kernels: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path))
    monkeypatch.setattr("edge_llm.engine.static.provider_state", lambda name: name)
    monkeypatch.delitem(RULES[StaticForm.QNN], "Softmax")  # type: ignore[attr-defined]
    with Engine.open(tiny_folder, EngineConfig(provider="qnn")) as engine:
        assert (engine.info.layout, engine.info.provider) == ("ring", "cpu")
        assert engine.info.notice.startswith("the CPU computes, not qnn: no graph for qnn: ")


@needs_openvino
def test_a_provider_with_wrong_logits_is_not_used(
    tiny_folder: Path, kernels: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise SessionError("the self-test gave wrong logits")

    monkeypatch.setattr("edge_llm.engine.static.self_test", wrong)
    with Engine.open(tiny_folder, CONFIG.with_options(layout="auto", provider="openvino")) as engine:
        assert engine.info.layout == "ring"
        assert "wrong logits" in engine.info.notice


@needs_openvino
def test_what_was_compiled_wrongly_is_compiled_again(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.with_options(layout="auto", provider="openvino")
    Engine.open(tiny_folder, config).close()
    tests: list[int] = []

    def wrong_once(*arguments: Any) -> None:
        tests.append(1)
        if len(tests) == 1:
            raise SessionError("the self-test gave wrong logits")
        self_test(*arguments)

    monkeypatch.setattr("edge_llm.engine.static.self_test", wrong_once)
    with Engine.open(tiny_folder, config) as engine:
        assert (engine.info.provider, engine.info.notice) == ("openvino", "")
    assert len(tests) == 2


def test_compiled_graphs_of_other_models_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path))
    assert not forget_compiled("openvino", Path("a"))
    for name in ("openvino-a-1.8-2", "openvino-b-1.8-2"):
        (tmp_path / "cache" / "providers" / name).mkdir(parents=True)
    assert forget_compiled("openvino", Path("a"))
    assert [path.name for path in (tmp_path / "cache" / "providers").iterdir()] == ["openvino-b-1.8-2"]


def test_the_ring_is_the_cpus_alone() -> None:
    with pytest.raises(ParameterError, match="CPU only"):
        EngineConfig(layout="ring", provider="openvino")
