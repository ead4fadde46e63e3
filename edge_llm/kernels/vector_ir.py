"""Small builders of LLVM vector code, for kernels written as IR inside Numba `@intrinsic`s, the same for every CPU.

Every function takes the llvmlite builder first. An address is an i64 value; `align` is the number of bytes the address
is known to be a multiple of. What depends on the CPU (dot product, fused multiply-add, fp16) is in `lowering`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
F32 = ir.FloatType()


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    """The type of `lanes` elements."""
    return ir.VectorType(element, lanes)


def constant(element: ir.Type, lanes: int, value: float) -> ir.Constant:
    """A vector with `value` in every lane."""
    return ir.Constant(vector(element, lanes), [value] * lanes)


def offset(builder: Any, address: Any, number: Any) -> Any:
    """`address` moved by `number` bytes (a Python integer or an i64 value)."""
    if isinstance(number, int):
        if number == 0:
            return address
        number = I64(number)
    return builder.add(address, number)


def load(builder: Any, address: Any, kind: ir.Type, align: int = 1) -> Any:
    """The scalar or vector of type `kind` that stands at `address`."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder: Any, value: Any, address: Any, align: int = 1) -> None:
    """Write a scalar or vector to `address`."""
    instruction = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    instruction.align = align


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector with `scalar` in every lane."""
    nothing = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, scalar, I32(0))
    return builder.shuffle_vector(first, nothing, constant(I32, lanes, 0))


def load_broadcast(builder: Any, address: Any, element: ir.Type, lanes: int, align: int = 4) -> Any:
    """A vector with the one element that stands at `address` in every lane."""
    return broadcast(builder, load(builder, address, element, align), lanes)


def slice_lanes(builder: Any, value: Any, first: int, count: int) -> Any:
    """The lanes `first` .. `first + count - 1` of a vector."""
    nothing = ir.Constant(value.type, ir.Undefined)
    return builder.shuffle_vector(value, nothing, ir.Constant(vector(I32, count), list(range(first, first + count))))


def integers_to_float(builder: Any, value: Any) -> Any:
    """Signed integers of any width as float32, lane by lane."""
    return builder.sitofp(value, vector(F32, value.type.count))


def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at `address`, which need not be memory of ours: a prefetch never faults."""
    read, keep, data = I32(0), I32(3), I32(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.inttoptr(address, I8.as_pointer()), read, keep, data])


def call(builder: Any, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    """Call the LLVM intrinsic `name`, declared on first use."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [argument.type for argument in arguments]), name)
    return builder.call(function, arguments)
