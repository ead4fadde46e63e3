"""The static graph says what the source's blocks say, whatever their type, and holds nothing but standard ops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edge_llm.errors import ModelFormatError
from edge_llm.export.reference_graph import write_reference
from edge_llm.export.static_export import export_static
from edge_llm.export.static_graph import write_static
from edge_llm.model.manifest import GRAPH_NAME
from edge_llm.model.static_folder import STATIC_GRAPH, STATIC_WEIGHTS, StaticForm
from edge_llm.model.step import Segment, Step
from edge_llm.model.stock_session import StockSession
from tests.conftest import export
from tests.model import static_rig
from tools.tiny_model import write_tiny_gguf

IDS = np.random.default_rng(3).integers(4, 300, 40).tolist()
KINDS = ["F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
STANDARD = {"Add", "Concat", "DequantizeLinear", "Div", "Gather", "MatMul", "Mul", "ReduceMean", "ReduceSum", "Reshape"}
STANDARD |= {"Sigmoid", "Softmax", "Split", "Sqrt", "Transpose"}
OF_FORMS = {
    StaticForm.BLOCKS: STANDARD,
    StaticForm.F32: STANDARD - {"DequantizeLinear", "ReduceSum"},
    StaticForm.QNN: STANDARD - {"DequantizeLinear", "Gather"} | {"MatMulNBits"},
    StaticForm.COREML: STANDARD - {"DequantizeLinear", "ReduceSum", "Gather"},
}


def logits(folder: Path, static_folder: Path, *, optimised: bool) -> np.ndarray:
    opened = static_rig.opened(folder, static_folder, context=64, max_chunk=64, optimised=optimised)
    with opened as (session, cache):
        slot = cache.acquire()
        assert slot is not None
        return session.forward(Step((Segment(slot, 0, IDS, len(IDS)),)))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_block_is_exact(tmp_path: Path, kind: str) -> None:
    """In each form, by the float32 arithmetic of ONNX Runtime's CPU provider."""
    sizes = {"layers": 1, "hidden": 256, "heads": 4, "head_dim": 64, "intermediate": 256, "tied": kind != "Q4_K"}
    (tmp_path / "tiny").mkdir()
    source = write_tiny_gguf(tmp_path / "tiny" / "tiny.gguf", matrix_type=kind, head_type="Q8_0", **sizes)
    folder = export(source, tmp_path / "tiny" / "exported")
    expected = StockSession(write_reference(folder, tmp_path, window=64), threads=1).logits(np.array(IDS))
    for form in StaticForm:
        static_folder = tmp_path / form.value
        static_folder.mkdir()
        export_static(folder, static_folder, form)
        assert distance(logits(folder, static_folder, optimised=False), expected) < 2e-5
    assert distance(logits(folder, tmp_path / "blocks", optimised=True), expected) < 0.06  # with int8 activations


@pytest.mark.parametrize("form", StaticForm)
def test_only_standard_ops_of_small_rank(tiny_folder: Path, tmp_path: Path, form: StaticForm) -> None:
    write_static(tiny_folder, tmp_path, form)
    model = onnx.load(tmp_path / STATIC_GRAPH)
    onnx.checker.check_model(model)
    assert {node.op_type for node in model.graph.node} == OF_FORMS[form]
    assert {node.op_type for node in model.graph.node if node.domain} <= {"MatMulNBits"}
    inferred = onnx.shape_inference.infer_shapes(model)
    assert max(len(value.type.tensor_type.shape.dim) for value in inferred.graph.value_info) <= 4


def test_two_exports_are_equal(tiny_folder: Path, tmp_path: Path) -> None:
    written = []
    for name in "ab":
        (tmp_path / name).mkdir()
        write_static(tiny_folder, tmp_path / name)
        written.append([(tmp_path / name / file).read_bytes() for file in (STATIC_GRAPH, STATIC_WEIGHTS)])
    assert written[0] == written[1]


@pytest.mark.parametrize("form", StaticForm)
def test_a_graph_that_is_not_ours_is_refused(tiny_folder: Path, tmp_path: Path, form: StaticForm) -> None:
    folder, target = tmp_path / "model", tmp_path / "static"
    folder.mkdir()
    target.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).symlink_to(path)
    model = onnx.load(tiny_folder / GRAPH_NAME, load_external_data=False)
    model.graph.node[3].op_type = "Loop"
    (folder / GRAPH_NAME).unlink()
    (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
    with pytest.raises(ModelFormatError, match="Loop, which has no static form"):
        write_static(folder, target, form)
