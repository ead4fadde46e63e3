"""The intrinsics that let compiled code work with plain addresses: call a C function, and see memory as an array.

Addresses travel as int64. `call_n(address, a, b, ...)` calls a C function taking n integers or pointers and returning
one; the `..._at` functions give typed arrays over memory whose true extent the caller knows.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

_I64 = ir.IntType(64)


def _generate_call(builder: Any, function: Any, arguments: list[Any]) -> Any:
    signature = ir.FunctionType(_I64, [_I64] * len(arguments))
    return builder.call(builder.inttoptr(function, signature.as_pointer()), arguments)


@intrinsic
def call_1(typing_context: Any, function: Any, a: Any) -> Any:
    """Call a C function of one integer or pointer."""
    return types.int64(*[types.int64] * 2), lambda context, builder, signature, args: _generate_call(
        builder, args[0], args[1:]
    )


@intrinsic
def call_2(typing_context: Any, function: Any, a: Any, b: Any) -> Any:
    """Call a C function of two integers or pointers."""
    return types.int64(*[types.int64] * 3), lambda context, builder, signature, args: _generate_call(
        builder, args[0], args[1:]
    )


@intrinsic
def call_3(typing_context: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """Call a C function of three integers or pointers."""
    return types.int64(*[types.int64] * 4), lambda context, builder, signature, args: _generate_call(
        builder, args[0], args[1:]
    )


@intrinsic
def call_5(typing_context: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call a C function of five integers or pointers."""
    return types.int64(*[types.int64] * 6), lambda context, builder, signature, args: _generate_call(
        builder, args[0], args[1:]
    )


def _pointer_to(element: types.Type) -> Any:
    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


_pointer_f32 = _pointer_to(types.float32)
_pointer_f64 = _pointer_to(types.float64)
_pointer_i64 = _pointer_to(types.int64)
_pointer_i32 = _pointer_to(types.int32)
_pointer_i8 = _pointer_to(types.int8)
_pointer_u8 = _pointer_to(types.uint8)


@numba.njit(inline="always")
def f32_at(address: int, count: int) -> Any:
    """float32 [count] at `address`."""
    return carray(_pointer_f32(address), (count,))


@numba.njit(inline="always")
def f64_at(address: int, count: int) -> Any:
    """float64 [count] at `address`."""
    return carray(_pointer_f64(address), (count,))


@numba.njit(inline="always")
def i64_at(address: int, count: int) -> Any:
    """int64 [count] at `address`."""
    return carray(_pointer_i64(address), (count,))


@numba.njit(inline="always")
def i32_at(address: int, count: int) -> Any:
    """int32 [count] at `address`."""
    return carray(_pointer_i32(address), (count,))


@numba.njit(inline="always")
def i8_at(address: int, count: int) -> Any:
    """int8 [count] at `address`."""
    return carray(_pointer_i8(address), (count,))


@numba.njit(inline="always")
def u8_at(address: int, count: int) -> Any:
    """uint8 [count] at `address`."""
    return carray(_pointer_u8(address), (count,))
