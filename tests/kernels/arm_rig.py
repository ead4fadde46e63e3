"""Prints the AArch64 assembly of the kernels' hand-written vector code, as JSON {name: text}, on any machine.

For a process in which NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name an ARM CPU. Nothing is run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from edge_llm.kernels import quantise_ir, row_ir, softmax_ir, tile_product
from edge_llm.kernels.linear_ir import multiply_row, multiply_tile
from edge_llm.kernels.lowering import detect_lowering, target_cpu
from tests.kernels.linear_rig import FORMS

TRIPLE = "aarch64-unknown-linux-gnu"
_KINDS = {types.int64: ir.IntType(64), types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


class _Context:
    """What the code generators of intrinsics ask of Numba's context."""

    @staticmethod
    def get_dummy_value() -> ir.Constant:
        return ir.Constant(ir.IntType(8).as_pointer(), None)


def intrinsics() -> dict[str, Any]:
    """Everything that multiplies blocks or tiles, and what prepares the operands."""
    lowering = detect_lowering()
    found: dict[str, Any] = {"quantise_row": quantise_ir.quantise_row(lowering)}
    for form in FORMS:
        name = f"{form.bits}_{form.block}{'_minimum' if form.minimum else ''}"
        found[f"row_{name}"], found[f"tile_{name}"] = multiply_row(lowering, [form]), multiply_tile(lowering, [form])
    for module in (row_ir, softmax_ir, tile_product):
        own = {name: value for name, value in vars(module).items() if isinstance(value, type(tile_product.scores_int8))}
        found |= own
    return found


def assembly(intrinsic: Any, machine: llvm.TargetMachine) -> str:
    """The intrinsic as a function of its own."""
    define = intrinsic._defn
    signature, generate = define(None, *[None] * (define.__code__.co_argcount - 1))
    module = ir.Module()
    result = _KINDS.get(signature.return_type, ir.VoidType())
    function = ir.Function(module, ir.FunctionType(result, [_KINDS[kind] for kind in signature.args]), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    value = generate(_Context, builder, signature, list(function.args))
    if isinstance(result, ir.VoidType):
        builder.ret_void()
    else:
        builder.ret(value)
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = TRIPLE
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def main() -> None:
    """Print the assembly of all of them."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    name, features = target_cpu()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=name, features=features, opt=3)
    json.dump({key: assembly(value, machine) for key, value in intrinsics().items()}, sys.stdout)


if __name__ == "__main__":
    main()
