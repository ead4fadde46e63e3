"""How the kernels' vector code is put on this CPU: the width, the dot product of bytes, fused multiply-add, fp16.

A lowering is chosen from the name and features of the CPU that Numba compiles for, so NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES choose another one (that is how they are tested). All of them read the same bytes; results are
promised to be equal bit for bit within one lowering only.

    avx512vnni  16 lanes, vpdpbusd on zmm          neondot  4 lanes, sdot (Raspberry Pi 5)
    avxvnni      8 lanes, vpdpbusd on ymm          neon     4 lanes, smull + sadalp (Raspberry Pi 4)
    avx2         8 lanes, pmaddubsw + pmaddwd      generic  4 lanes, plain vector operations of LLVM, any CPU
    sse4.1       4 lanes, as avx2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba.core.config
from llvmlite import ir
from numba.core.codegen import get_host_cpu_features

from edge_llm.kernels.vector_ir import (
    F32,
    I8,
    I16,
    I32,
    broadcast,
    call,
    constant,
    load,
    load_broadcast,
    offset,
    slice_lanes,
    vector,
)

MAX_STEPS = 8
"""(codes, activations) pairs that `dot_nibbles` and `dot_bytes` add up: 16-bit sums hold 8 * 2 * 15 * 128"""


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
    signed: bool = False
    """it multiplies signed bytes only: `dot_bytes` takes codes of 8 bits less 128, as `byte_codes` gives them"""
    registers: int = 16
    """vector registers that code may count on"""

    @property
    def bytewise(self) -> bool:
        """`dot_bytes` multiplies whole bytes and need not take them apart."""
        return self.dot or self.signed


AVX512VNNI = Lowering("avx512vnni", 16, dot=True, fused=True, half=True, registers=32)
AVXVNNI = Lowering("avxvnni", 8, dot=True, fused=True, half=True)
AVX2 = Lowering("avx2", 8, dot=False, fused=True, half=True)
SSE41 = Lowering("sse4.1", 4, dot=False, fused=False, half=False)
NEONDOT = Lowering("neondot", 4, dot=True, fused=True, half=True, signed=True, registers=32)
NEON = Lowering("neon", 4, dot=False, fused=True, half=True, signed=True, registers=32)
GENERIC = Lowering("generic", 4, dot=False, fused=False, half=False)

# The first whose features the CPU all has is taken; no two architectures share a feature's name.
_NEEDS: tuple[tuple[Lowering, set[str]], ...] = (
    (AVX512VNNI, {"avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c"}),
    (AVXVNNI, {"avx2", "avxvnni", "fma", "f16c"}),
    (AVX2, {"avx2", "fma", "f16c"}),
    (SSE41, {"sse4.1"}),
    (NEONDOT, {"neon", "dotprod"}),
    (NEON, {"neon"}),
    (GENERIC, set()),
)

_BYTE_PAIRS = {AVX2: "llvm.x86.avx2.pmadd.ub.sw", SSE41: "llvm.x86.ssse3.pmadd.ub.sw.128"}
"""multiply unsigned with signed bytes and add neighbours, in 16 bits"""
_WORD_PAIRS = {AVX2: "llvm.x86.avx2.pmadd.wd", SSE41: "llvm.x86.sse2.pmadd.wd"}
"""multiply 16-bit words and add neighbours, in 32 bits"""


def target_cpu() -> tuple[str, str]:
    """Name and features ("+avx2,-avx512f,...") of the CPU that Numba compiles for, overrides included."""
    name, features = numba.core.config.CPU_NAME, numba.core.config.CPU_FEATURES
    return (
        llvm.get_host_cpu_name() if name is None else name,
        get_host_cpu_features() if features is None else features,
    )


def detect_lowering() -> Lowering:
    """The best lowering for the CPU that Numba compiles for."""
    name, features = target_cpu()
    present = {word[1:] for word in features.split(",") if word.startswith("+")}
    # LLVM reads few of an ARM CPU's features from the system, and goes by its name for the others.
    if "neon" in present and _has_sdot(name, features):
        present.add("dotprod")
    return next(lowering for lowering, needs in _NEEDS if needs <= present)


_BYTE_PRODUCT = """
define i32 @product(<16 x i8> %a, <16 x i8> %b) {
  %x = sext <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %z = mul <16 x i32> %x, %y
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %z)
  ret i32 %sum
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


@cache
def _has_sdot(name: str, features: str) -> bool:
    """Whether LLVM takes the ARM CPU `name` with `features` to have sdot: it then uses it here, and can select it."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64").create_target_machine(cpu=name, features=features)
    return "sdot" in machine.emit_assembly(llvm.parse_assembly(_BYTE_PRODUCT))


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


def byte_codes(builder: Any, lowering: Lowering, codes: Any) -> Any:
    """Codes 0..255 as `dot_bytes` takes them (see `Lowering.signed`). Codes below 128 it also takes as they are."""
    return builder.xor(codes, constant(I8, codes.type.count, 128)) if lowering.signed else codes


def broadcast_steps(builder: Any, lowering: Lowering, address: Any, steps: int) -> list[Any]:
    """The activations of `steps` dot products, a multiple of 4: each time the next four bytes, in every lane."""
    lanes, kind = lowering.lanes, vector(I8, 4 * lowering.lanes)
    if lowering.signed:  # sdot takes any lane of a vector, and loads that spread one are slow
        words = [load(builder, offset(builder, address, 16 * i), vector(I32, 4), 4) for i in range(steps // 4)]
        picked = [constant(I32, lanes, lane) for lane in range(4)]
        return [builder.bitcast(builder.shuffle_vector(four, four, lane), kind) for four in words for lane in picked]
    fours = [load_broadcast(builder, offset(builder, address, 4 * t), I32, lanes) for t in range(steps)]
    return [builder.bitcast(four, kind) for four in fours]


def sum_bytes(builder: Any, lowering: Lowering, address: Any, count: int) -> Any:
    """i32 [lanes]: in every lane the sum of the `count` signed bytes at `address`, not -128 and whole vectors of them."""
    kind, size = vector(I8, 4 * lowering.lanes), 4 * lowering.lanes
    parts = [load(builder, offset(builder, address, at), kind, 4) for at in range(0, count, size)]
    steps = [(constant(I8, size, 1), part) for part in parts]
    sums = dot_nibbles(builder, lowering, constant(I32, lowering.lanes, 0), steps)
    total = call(builder, f"llvm.vector.reduce.add.v{lowering.lanes}i32", I32, [sums])
    return broadcast(builder, total, lowering.lanes)


def dot_nibbles(builder: Any, lowering: Lowering, acc: Any, steps: Sequence[tuple[Any, Any]]) -> Any:
    """i32 [lanes]: acc + the sums over each lane's four bytes of code (0..15) * activation (s8), exactly.

    `steps`: up to `MAX_STEPS` pairs (codes, activations), each i8 [4 * lanes]; together they are cheaper than one by one.
    """
    if lowering.dot:
        return _dot(builder, lowering, acc, steps)
    if lowering.signed:
        return _dot_neon(builder, acc, steps)
    return _dot_pairs(builder, lowering, [acc], [steps], nibbles=True)[0]


def dot_bytes(builder: Any, lowering: Lowering, acc: Any, steps: Sequence[tuple[Any, Any]]) -> Any:
    """As `dot_nibbles` for codes from `byte_codes` and activations -127..127."""
    if lowering.dot:
        return _dot(builder, lowering, acc, steps)
    if lowering.signed:
        for step in steps:  # two products are all that 16 bits hold
            acc = _dot_neon(builder, acc, [step])
        return acc
    return _dot_pairs(builder, lowering, [acc], [steps], nibbles=False)[0]


def dot_many(
    builder: Any, lowering: Lowering, accs: Sequence[Any], steps: Sequence[Sequence[tuple[Any, Any]]], *, nibbles: bool
) -> list[Any]:
    """`dot_nibbles` or `dot_bytes` for several accumulators at once, `steps[i]` going to `accs[i]`.

    All have equally many steps; they are emitted so that the chains of dependent instructions overlap.
    """
    if not lowering.dot and not lowering.signed:
        return _dot_pairs(builder, lowering, accs, steps, nibbles=nibbles)
    if not lowering.dot:
        dot = dot_nibbles if nibbles else dot_bytes
        return [dot(builder, lowering, acc, own) for acc, own in zip(accs, steps, strict=True)]
    accs = list(accs)
    for turn in zip(*steps, strict=True):
        accs = [_dot(builder, lowering, acc, [step]) for acc, step in zip(accs, turn, strict=True)]
    return accs


def pause(builder: Any, lowering: Lowering) -> None:
    """Let a core that waits for another one rest for a moment, where it has an instruction for that."""
    if lowering in (AVX512VNNI, AVXVNNI, AVX2, SSE41):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif lowering.signed:
        call(builder, "llvm.aarch64.hint", ir.VoidType(), [I32(1)])  # yield


def dot_words(builder: Any, lowering: Lowering, acc: Any, a: Any, b: Any) -> Any:
    """acc + the products of the two signed 16-bit words of each 32-bit lane."""
    lanes = acc.type.count
    if lowering in _WORD_PAIRS:
        words = vector(I16, 2 * lanes)
        pair = [builder.bitcast(value, words) for value in (a, b)]
        return builder.add(acc, call(builder, _WORD_PAIRS[lowering], acc.type, pair))
    sixteen = constant(I32, lanes, 16)
    low = [builder.ashr(builder.shl(value, sixteen), sixteen) for value in (a, b)]
    high = [builder.ashr(value, sixteen) for value in (a, b)]
    return builder.add(builder.add(acc, builder.mul(*low)), builder.mul(*high))


def _dot(builder: Any, lowering: Lowering, acc: Any, steps: Sequence[tuple[Any, Any]]) -> Any:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * acc.type.count}"
    if lowering.signed:
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    for codes, activations in steps:
        acc = call(builder, name, acc.type, [acc, codes, activations])
    return acc


def _dot_neon(builder: Any, acc: Any, steps: Sequence[tuple[Any, Any]]) -> Any:
    """Both halves multiplied and summed in 16 bits (smull, smlal), neighbours added (addp), and again into acc (sadalp)."""
    _check_count(steps)
    words = vector(I16, 8)
    halves = []
    for first in (0, 8):
        total = None
        for pair in steps:
            half = [slice_lanes(builder, value, first, 8) for value in pair]
            product = call(builder, "llvm.aarch64.neon.smull.v8i16", words, half)
            total = product if total is None else builder.add(total, product)
        halves.append(total)
    pairs = call(builder, "llvm.aarch64.neon.addp.v8i16", words, halves)
    return builder.add(acc, call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, [pairs]))


def _check_count(steps: Sequence[tuple[Any, Any]]) -> None:
    if len(steps) > MAX_STEPS:
        raise ValueError(f"{len(steps)} steps overflow 16 bits, at most {MAX_STEPS} fit")


def _dot_pairs(
    builder: Any, lowering: Lowering, accs: Sequence[Any], steps: Sequence[Sequence[tuple[Any, Any]]], *, nibbles: bool
) -> list[Any]:
    """`dot_many` by 16-bit sums of neighbours, emitted step after step, so that few registers hold all that is under way.

    Codes of 8 bits are taken apart first, for pmaddubsw saturates above 128, and each half has a sum of its own.
    """
    for own in steps:
        _check_count(own)
    weights = (1,) if nibbles else (1, 16)
    totals: list[list[Any]] = [[None] * len(accs) for _ in weights]
    for turn in zip(*steps, strict=True):
        parts: dict[int, tuple[Any, ...]] = {}  # rows share codes
        for i, (codes, activations) in enumerate(turn):
            if id(codes) not in parts:
                parts[id(codes)] = (codes,) if nibbles else split_nibbles(builder, codes)
            for part, sums in zip(parts[id(codes)], totals, strict=True):
                product = _multiply_pairs(builder, lowering, part, activations)
                sums[i] = product if sums[i] is None else builder.add(sums[i], product)
    accs = list(accs)
    for sums, weight in zip(totals, weights, strict=True):
        accs = [builder.add(acc, _widen(builder, lowering, own, weight)) for acc, own in zip(accs, sums, strict=True)]
    return accs


def _multiply_pairs(builder: Any, lowering: Lowering, codes: Any, activations: Any) -> Any:
    """i16 [2 * lanes]: the sums of the products of two neighbouring bytes; codes 0..15."""
    pairs = vector(I16, 2 * lowering.lanes)
    if lowering in _BYTE_PAIRS:
        return call(builder, _BYTE_PAIRS[lowering], pairs, [codes, activations])
    return _multiply_bytes(builder, pairs, codes, activations)


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
    if lowering in _WORD_PAIRS:
        return call(builder, _WORD_PAIRS[lowering], words, [sums, constant(I16, sums.type.count, weight)])
    sixteen = constant(I32, lowering.lanes, 16)
    sums = builder.bitcast(sums, words)
    total = builder.add(builder.ashr(builder.shl(sums, sixteen), sixteen), builder.ashr(sums, sixteen))
    return total if weight == 1 else builder.mul(total, constant(I32, lowering.lanes, weight))
