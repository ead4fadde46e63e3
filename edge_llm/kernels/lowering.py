"""How the kernels' vector code is put on this CPU: the width, the dot product of bytes, fused multiply-add, fp16.

A lowering is chosen from the name and features of the CPU that Numba compiles for, so NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES choose another one (that is how they are tested). All of them read the same bytes; results are
promised to be equal bit for bit within one lowering only.

    avx512vnni  16 lanes, vpdpbusd on zmm          avx2     8 lanes, pmaddubsw + pmaddwd on codes of four bits
    avxvnni      8 lanes, vpdpbusd on ymm          generic  4 lanes, plain vector operations of LLVM, any CPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numba.core.config
from numba.core.codegen import get_host_cpu_features

from edge_llm.kernels.vector_ir import F32, I8, I16, I32, call, constant, vector

MAX_STEPS = 8
"""(codes, activations) pairs that `dot_nibbles` and `dot_bytes` add up: the i16 sums of AVX2 hold 8 * 2 * 15 * 128"""


@dataclass(frozen=True)
class Lowering:
    """What the CPU offers. `lanes` float32 or int32, so 4 * lanes bytes, make a vector."""

    name: str
    lanes: int
    dot: bool
    """it has the dot product of four bytes as one instruction"""
    fused: bool
    """it has fused multiply-add"""
    half: bool
    """it converts fp16"""

    @property
    def registers(self) -> int:
        """Vector registers that code may count on."""
        return 32 if self.name == "avx512vnni" else 16


AVX512VNNI = Lowering("avx512vnni", 16, dot=True, fused=True, half=True)
AVXVNNI = Lowering("avxvnni", 8, dot=True, fused=True, half=True)
AVX2 = Lowering("avx2", 8, dot=False, fused=True, half=True)
GENERIC = Lowering("generic", 4, dot=False, fused=False, half=False)

# The first whose features the CPU all has is taken. A NEON lowering (sdot, codes xor 0x80) goes in front of the last.
_NEEDS: tuple[tuple[Lowering, set[str]], ...] = (
    (AVX512VNNI, {"avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c"}),
    (AVXVNNI, {"avx2", "avxvnni", "fma", "f16c"}),
    (AVX2, {"avx2", "fma", "f16c"}),
    (GENERIC, set()),
)


def target_cpu() -> tuple[str, str]:
    """Name and features ("+avx2,-avx512f,...") of the CPU that Numba compiles for, overrides included."""
    name, features = numba.core.config.CPU_NAME, numba.core.config.CPU_FEATURES
    return (
        llvm.get_host_cpu_name() if name is None else name,
        get_host_cpu_features() if features is None else features,
    )


def detect_lowering() -> Lowering:
    """The best lowering for the CPU that Numba compiles for."""
    _, features = target_cpu()
    present = {word[1:] for word in features.split(",") if word.startswith("+")}
    return next(lowering for lowering, needs in _NEEDS if needs <= present)


def fma(builder: Any, lowering: Lowering, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 vectors: rounded once where the CPU can, else twice (libm's is slow, or missing)."""
    if not lowering.fused:
        return builder.fadd(builder.fmul(a, b), c)
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def half_to_float(builder: Any, lowering: Lowering, value: Any) -> Any:
    """fp16 vector as float32, exactly."""
    lanes = value.type.count
    if lowering.half:
        return builder.fpext(value, vector(F32, lanes))
    # The bits moved into place and multiplied by 2^112 are the value, also for subnormals; exponent 31 is inf or NaN.
    bits = builder.zext(builder.bitcast(value, vector(I16, lanes)), vector(I32, lanes))
    sign = builder.shl(builder.and_(bits, constant(I32, lanes, 0x8000)), constant(I32, lanes, 16))
    size = builder.shl(builder.and_(bits, constant(I32, lanes, 0x7FFF)), constant(I32, lanes, 13))
    scaled = builder.fmul(builder.bitcast(size, vector(F32, lanes)), constant(F32, lanes, 2.0**112))
    special = builder.icmp_unsigned(">=", size, constant(I32, lanes, 31 << 23))
    infinite = builder.or_(size, constant(I32, lanes, 0x7F800000))
    number = builder.select(special, infinite, builder.bitcast(scaled, vector(I32, lanes)))
    return builder.bitcast(builder.or_(number, sign), vector(F32, lanes))


def split_nibbles(builder: Any, codes: Any) -> tuple[Any, Any]:
    """Low and high halves of each byte, as two vectors of bytes 0..15."""
    lanes = codes.type.count
    low = builder.and_(codes, constant(I8, lanes, 15))
    return low, builder.lshr(codes, constant(I8, lanes, 4))


def dot4_nibble(builder: Any, lowering: Lowering, acc: Any, codes: Any, activations: Any) -> Any:
    """i32 [lanes]: acc + the sum over each lane's four bytes of code (u8, 0..15) * activation (s8). Exact."""
    return dot_nibbles(builder, lowering, acc, [(codes, activations)])


def dot4_byte(builder: Any, lowering: Lowering, acc: Any, codes: Any, activations: Any) -> Any:
    """As `dot4_nibble` for codes 0..255. Exact on every lowering."""
    return dot_bytes(builder, lowering, acc, [(codes, activations)])


def dot_nibbles(builder: Any, lowering: Lowering, acc: Any, steps: Sequence[tuple[Any, Any]]) -> Any:
    """`dot4_nibble` over up to `MAX_STEPS` pairs (codes, activations), each i8 [4 * lanes]; cheaper than one by one."""
    if lowering.dot:
        return _dot_vnni(builder, acc, steps)
    return builder.add(acc, _widen(builder, lowering, _pair_sums(builder, lowering, steps), 1))


def dot_bytes(builder: Any, lowering: Lowering, acc: Any, steps: Sequence[tuple[Any, Any]]) -> Any:
    """`dot4_byte` over up to `MAX_STEPS` pairs (codes, activations)."""
    if lowering.dot:
        return _dot_vnni(builder, acc, steps)
    # pmaddubsw saturates at codes above 128, so low and high nibbles are summed apart.
    halves = [split_nibbles(builder, codes) for codes, _ in steps]
    for part, weight in ((0, 1), (1, 16)):
        chosen = [(half[part], step[1]) for half, step in zip(halves, steps, strict=True)]
        acc = builder.add(acc, _widen(builder, lowering, _pair_sums(builder, lowering, chosen), weight))
    return acc


def dot_many(
    builder: Any, lowering: Lowering, accs: Sequence[Any], steps: Sequence[Sequence[tuple[Any, Any]]], *, nibbles: bool
) -> list[Any]:
    """`dot_nibbles` or `dot_bytes` for several accumulators at once, `steps[i]` going to `accs[i]`.

    All have equally many steps; they are emitted so that the chains of dependent instructions overlap.
    """
    if not lowering.dot:
        dot = dot_nibbles if nibbles else dot_bytes
        return [dot(builder, lowering, acc, own) for acc, own in zip(accs, steps, strict=True)]
    accs = list(accs)
    for turn in zip(*steps, strict=True):
        accs = [_dot_vnni(builder, acc, [step]) for acc, step in zip(accs, turn, strict=True)]
    return accs


def _dot_vnni(builder: Any, acc: Any, steps: Sequence[tuple[Any, Any]]) -> Any:
    for codes, activations in steps:
        acc = call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * acc.type.count}", acc.type, [acc, codes, activations])
    return acc


def _pair_sums(builder: Any, lowering: Lowering, steps: Sequence[tuple[Any, Any]]) -> Any:
    """i16 [2 * lanes]: over all steps, the sums of the products of two neighbouring bytes; codes 0..15."""
    if len(steps) > MAX_STEPS:
        raise ValueError(f"{len(steps)} steps overflow 16 bits, at most {MAX_STEPS} fit")
    pairs = vector(I16, 2 * lowering.lanes)
    total = None
    for codes, activations in steps:
        if lowering is AVX2:
            product = call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, [codes, activations])
        else:
            product = _multiply_bytes(builder, pairs, codes, activations)
        total = product if total is None else builder.add(total, product)
    return total


def _multiply_bytes(builder: Any, pairs: Any, codes: Any, activations: Any) -> Any:
    """What pmaddubsw gives where nothing saturates: even and odd bytes as 16-bit numbers, multiplied and added."""
    eight = constant(I16, pairs.count, 8)
    codes, activations = builder.bitcast(codes, pairs), builder.bitcast(activations, pairs)
    even = builder.mul(
        builder.and_(codes, constant(I16, pairs.count, 255)), builder.ashr(builder.shl(activations, eight), eight)
    )
    return builder.add(even, builder.mul(builder.lshr(codes, eight), builder.ashr(activations, eight)))


def _widen(builder: Any, lowering: Lowering, sums: Any, weight: int) -> Any:
    """i32 [lanes]: `weight` times the two 16-bit sums of each lane, added."""
    words = vector(I32, lowering.lanes)
    if lowering is AVX2:
        return call(builder, "llvm.x86.avx2.pmadd.wd", words, [sums, constant(I16, sums.type.count, weight)])
    sixteen = constant(I32, lowering.lanes, 16)
    sums = builder.bitcast(sums, words)
    total = builder.add(builder.ashr(builder.shl(sums, sixteen), sixteen), builder.ashr(sums, sixteen))
    return total if weight == 1 else builder.mul(total, constant(I32, lowering.lanes, weight))
