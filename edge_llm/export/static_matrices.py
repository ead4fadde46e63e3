"""The matrices of a static graph: block codes become what the form's target multiplies by, exact to what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edge_llm.export.device_rules import MICROSOFT
from edge_llm.export.graph_rewriter import GraphRewriter
from edge_llm.kernels.block_format import BlockFormat, group_count, unpack_parts
from edge_llm.model.static_folder import STATIC_WEIGHTS, StaticForm

_ALIGNMENT = 4096  # of a memory map


class StaticMatrices(GraphRewriter):
    """Rewrites BlockLinear; large constants go to the file of weights as they are made."""

    def __init__(self, folder: Path, form: StaticForm, weights: BinaryIO) -> None:
        super().__init__(folder)
        self._form, self._file = form, weights
        self._sums: dict[tuple[str, int], str] = {}
        self._same: dict[str, str] = {}
        """values that have another name in this graph"""

    @property
    def _all_logits(self) -> bool:
        """Whether the graph gives the logits of all rows, as devices want whose shapes are fixed: no row is picked."""
        return self._form in (StaticForm.QNN, StaticForm.COREML)

    def _linear(self, node: Any, attributes: dict[str, Any]) -> None:
        x, out = self._same.get(node.input[0], node.input[0]), node.output[0]
        if self._form in (StaticForm.F32, StaticForm.COREML):
            terms = [self._op("MatMul", [x, self._dense(node, attributes)])]
        else:
            terms = self._block_terms(x, node, attributes)
        if len(node.input) > 3:
            terms.append(self._initializer(node.input[3], self._stored(node.input[3])))
        for term in terms[1:-1]:
            terms[0] = self._op("Add", [terms[0], term])
        if len(terms) > 1:
            self._op("Add", [terms[0], terms[-1]], out=out)
        else:
            self.nodes[-1].output[0] = out

    def _dense(self, node: Any, attributes: dict[str, Any]) -> str:
        name = f"{node.input[1]}.dense"
        return self._stream(name, np.concatenate(list(self._parts(node, attributes))).T)

    def _block_terms(self, x: str, node: Any, attributes: dict[str, Any]) -> list[str]:
        """x @ W, exact to the blocks w = d * q + m: with c near the middle of the codes, d * (q - c) is what integer
        weights say, and m + d * c meets the sum of the block's inputs.

        Around the middle, so that a provider that rounds x to 8 bits multiplies its errors by small weights."""
        name = node.input[1]
        outputs, inputs, block = attributes["outputs"], attributes["inputs"], attributes["block"]
        form = BlockFormat(attributes["bits"], block, bool(attributes["minimum"]))
        codes, scales = (self._stored(stored).reshape(group_count(outputs), -1) for stored in node.input[1:3])
        q, d, m = unpack_parts(codes, scales, form, outputs, inputs)
        used = 8 if m is None else max(1, int(q.max()).bit_length())  # of the bits: some types have 2, 3 or 5
        centre = 1 << (used - 1)
        centred = (q.reshape(outputs, inputs).T.astype(np.int16) - centre).astype(np.int8)
        multiply = self._by_nbits if self._form is StaticForm.QNN else self._by_dequantized
        product = multiply(x, name, centred, d, form)
        if m is None:
            return [product]
        rest = self._stream(f"{name}.m", (m + d * np.float32(centre)).T)
        return [self._op("MatMul", [self._block_sums(x, inputs, block), rest]), product]

    def _by_dequantized(self, x: str, name: str, centred: np.ndarray, d: np.ndarray, form: BlockFormat) -> str:
        codes, scales = self._stream(f"{name}.codes", centred, bits=form.bits), self._stream(f"{name}.d", d.T)
        whole = self._op("DequantizeLinear", [codes, scales], axis=0, block_size=form.block)
        return self._op("MatMul", [x, whole])

    def _by_nbits(self, x: str, name: str, centred: np.ndarray, d: np.ndarray, form: BlockFormat) -> str:
        """By com.microsoft's MatMulNBits, whose unsigned codes stand for what they are above half of their range. With
        activations of three axes: Qualcomm's compiler takes no others."""
        inputs, outputs = centred.shape
        codes: np.ndarray = (centred.T.astype(np.int16) + (1 << form.bits - 1)).astype(np.uint8)
        if form.bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4  # the first lies in the low half
        parts = [
            self._reshape(x, [1, -1, inputs]),
            self._stream(f"{name}.codes", codes.reshape(outputs, inputs // form.block, -1)),
            self._stream(f"{name}.d", d),
        ]
        sizes = {"K": inputs, "N": outputs, "bits": form.bits, "block_size": form.block}
        product = self._op("MatMulNBits", parts, domain=MICROSOFT, **sizes)
        return self._reshape(product, [-1, outputs])

    def _block_sums(self, x: str, inputs: int, block: int) -> str:
        """[rows, inputs / block]."""
        if (x, block) not in self._sums:
            blocks = self._op("Reshape", [x, self._const([-1, inputs // block, block], np.int64)])
            self._sums[x, block] = self._op("ReduceSum", [blocks, self._const([2], np.int64)], keepdims=0)
        return self._sums[x, block]

    def _stream(self, name: str, values: np.ndarray, bits: int = 0) -> str:
        """A constant in the file of weights; int8 values of `bits` 4 lie two to a byte."""
        from onnx import TensorProto, helper

        if name in self.initializers:
            return name
        kind = TensorProto.INT4 if bits == 4 else helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, dims=values.shape, data_type=kind)
        data = np.ascontiguousarray(values)
        if bits == 4:
            pairs = data.reshape(-1, 2)  # the first lies in the low half
            data = (pairs[:, 0] & 15 | pairs[:, 1] << 4).view(np.uint8)
        tensor.data_location = TensorProto.EXTERNAL
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        for key, value in (("location", STATIC_WEIGHTS), ("offset", self._file.tell()), ("length", data.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._file.write(data.data)
        self.initializers[name] = tensor
        return name

    def _split(self, x: str, sizes: list[int], axis: int) -> list[str]:
        from onnx import helper

        self._count += 1
        outputs = [f"_{self._count}.{part}" for part in range(len(sizes))]
        inputs = [x, self._const(sizes, np.int64)]
        self.nodes.append(helper.make_node("Split", inputs, outputs, axis=axis))
        return outputs

    def _reshape(self, x: str, shape: list[int], out: str | None = None) -> str:
        return self._op("Reshape", [x, self._const(shape, np.int64)], out=out)
