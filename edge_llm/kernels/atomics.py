"""What threads of compiled code need of one another: a counter they share, a value seen in time, and a polite wait.

Addresses travel as int64, as in `pointers`; what stands there is an int64 aligned to its size.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from edge_llm.kernels.lowering import detect_lowering, pause
from edge_llm.kernels.vector_ir import I64, prefetch

_LOWERING = detect_lowering()


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def fetch_add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add `number` to the shared int64 at `address`; gives what it was. What was written before it is seen after it."""

    def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
        return builder.atomic_rmw("add", _place(builder, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_shared(typing_context: Any, address: Any) -> Any:
    """The shared int64 at `address`, and with it all that was written before it reached that value."""

    def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
        return builder.load_atomic(_place(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def rest(typing_context: Any) -> Any:
    """A moment's rest for a thread that looks at a shared value again and again."""

    def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
        pause(builder, _LOWERING)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def ask_for_line(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at `address`, which need not be memory of ours."""

    def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate
