"""RMS norm, with and without an addition before it, and the gated activation, a row at a time.

The numbers of a row depend on that row and its width alone. What is not a number stays so: NaN and infinity reach the
output, where the request fails visibly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from edge_llm.kernels.layout import ACTIVATION_BLOCK, CALL_FIELDS, Activation, ActivationCall, NormCall
from edge_llm.kernels.pointers import f32_at, f64_at, i64_at

# The sum of squares may be split among lanes, the exponential must not be reordered: its parts cancel.
_summing = numba.njit(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
_exact = numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")
_compiled = numba.njit(error_model="numpy")
_inlined = numba.njit(inline="always")

_ONE, _ZERO, _HALF = np.float32(1), np.float32(0), np.float32(0.5)
_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH = np.float32(355 / 512)  # ln 2 in two parts (Cody and Waite): whole numbers times the first are exact
_LN2_LOW = np.float32(math.log(2) - 355 / 512)
_LOWEST = np.float32(-88)  # its exponential is below the normal float32 numbers, and comes out as 0
# exp(r) = 1 + r + r^2 q(r) on |r| <= ln 2 / 2; q from Lawson's iteration for the relative error, which is 4e-9.
_Q0, _Q1, _Q2, _Q3, _Q4 = (np.float32(q) for q in (0.49999994, 0.16666521, 0.041668389, 0.0083687166, 0.0013814599))
_GELU_LINEAR = np.float32(2 * math.sqrt(2 / math.pi))
_GELU_CUBIC = np.float32(2 * math.sqrt(2 / math.pi) * 0.044715)


@_summing
def _inverse_rms(x: Any, eps: float) -> Any:
    """1 / sqrt(mean of x^2 + eps). In float64, where the square of no float32 overflows."""
    total = 0.0
    for i in range(x.shape[0]):
        total += np.float64(x[i]) * np.float64(x[i])
    return np.float32(1.0 / math.sqrt(total / x.shape[0] + eps))


@_exact
def _normalise(x: Any, gamma: Any, eps: float, out: Any) -> None:
    factor = _inverse_rms(x, eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * gamma[i]


@_exact
def _add(a: Any, b: Any, out: Any) -> None:
    for i in range(a.shape[0]):
        out[i] = a[i] + b[i]


@_inlined
def _norm_groups(call: int, source: int, row: int) -> None:
    """Norm each group of row `row` of the array at `source` into OUT."""
    fields = i64_at(call, CALL_FIELDS)
    width, group = fields[NormCall.WIDTH], fields[NormCall.GROUP]
    eps = f64_at(call, CALL_FIELDS)[NormCall.EPS]
    gamma = f32_at(fields[NormCall.GAMMA], group)
    for number in range(width // group):
        at = 4 * (row * width + number * group)
        _normalise(f32_at(source + at, group), gamma, eps, f32_at(fields[NormCall.OUT] + at, group))


@_compiled
def norm_row(call: int, row: int) -> None:
    """Row `row` of OUT = x / sqrt(mean(x^2) + eps) * gamma, for each group of x (RMSNorm, arXiv:1910.07467)."""
    fields = i64_at(call, CALL_FIELDS)
    _norm_groups(call, fields[NormCall.X], row)


@_compiled
def add_norm_row(call: int, row: int) -> None:
    """Row `row` of SUM = X + DELTA, and of OUT = its norm as in `norm_row`."""
    fields = i64_at(call, CALL_FIELDS)
    width = fields[NormCall.WIDTH]
    at = 4 * row * width
    total = f32_at(fields[NormCall.SUM] + at, width)
    _add(f32_at(fields[NormCall.X] + at, width), f32_at(fields[NormCall.DELTA] + at, width), total)
    _norm_groups(call, fields[NormCall.SUM], row)


@intrinsic
def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2^exponent as float32 for an int32 from -127 (which gives 0) to 127."""

    def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.add(args[0], word(127)), word(23)), ir.FloatType())

    return types.float32(types.int32), generate


@_inlined
def _sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) within 2e-7 relative; 0 for NaN, so that x * sigmoid(x) is NaN."""
    size = -abs(x)
    size = size if size > _LOWEST else _LOWEST  # also where size is NaN, which has no integer part
    exponent = np.int32(size * _LOG2_E - _HALF)
    n = np.float32(exponent)
    r = (size - n * _LN2_HIGH) - n * _LN2_LOW
    q = (((_Q4 * r + _Q3) * r + _Q2) * r + _Q1) * r + _Q0
    e = (q * (r * r) + r + _ONE) * _power_of_two(exponent)
    return (_ONE if x >= _ZERO else e) / (_ONE + e)


@_exact
def _silu(gate: Any, up: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = gate[i] * _sigmoid(gate[i]) * up[i]


@_exact
def _gelu_tanh(gate: Any, up: Any, out: Any) -> None:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), and (1 + tanh(z)) / 2 = sigmoid(2 z) (arXiv:1606.08415)."""
    for i in range(out.shape[0]):
        x = gate[i]
        out[i] = x * _sigmoid(x * (_GELU_CUBIC * (x * x) + _GELU_LINEAR)) * up[i]


@_compiled
def activation_part(call: int, item: int) -> None:
    """A part of a row, both by the number `item`, of OUT = f(gate) * up: silu(x) = x sigmoid(x), or gelu in its tanh form.

    Rows are cut as `linear_quantise` cuts them, which then goes on with a part.
    """
    fields = i64_at(call, CALL_FIELDS)
    width, parts = fields[ActivationCall.WIDTH], fields[ActivationCall.PARTS]
    row, part = item // parts, item % parts
    blocks = -(-width // ACTIVATION_BLOCK)
    first = blocks * part // parts * ACTIVATION_BLOCK
    size = min(width, blocks * (part + 1) // parts * ACTIVATION_BLOCK) - first
    gate = f32_at(fields[ActivationCall.X] + 4 * (2 * row * width + first), size)
    up = f32_at(fields[ActivationCall.X] + 4 * (2 * row * width + width + first), size)
    out = f32_at(fields[ActivationCall.OUT] + 4 * (row * width + first), size)
    if fields[ActivationCall.KIND] == Activation.SILU:
        _silu(gate, up, out)
    else:
        _gelu_tanh(gate, up, out)


_ROW = types.void(types.int64, types.int64)
ENTRIES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "norm_row": (_ROW, norm_row.py_func),
    "add_norm_row": (_ROW, add_norm_row.py_func),
    "activation_part": (_ROW, activation_part.py_func),
}
