"""The compute functions of the `edge_llm` ops: what ONNX Runtime calls in a step. No Python runs in them and no GIL is taken.

Each takes (op_kernel, context) and returns an OrtStatus*, 0 when all is well. `op_kernel` is the address of an `Op` record
that model/custom_ops.py filled: API functions, attributes, addresses of constants and of the session's workspace. A
compute function checks every size that it will rely on, fills the kernel's call record, and adds the kernel's phases, by
their addresses, to those of the step, which `team` runs on ONNX Runtime's own thread pool.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import types

from edge_llm.kernels.layout import (
    CACHE_MAGIC,
    CACHE_VERSION,
    LAYER_FIELDS,
    OP_FIELDS,
    PHASES_OF_AN_OP,
    UNBOUNDED,
    WORKSPACE_FIELDS,
    ActivationCall,
    ActivationOp,
    AttentionCall,
    AttentionOp,
    Cache,
    CacheLayer,
    EmbeddingCall,
    Items,
    LinearCall,
    LinearOp,
    NormCall,
    NormOp,
    Op,
    Workspace,
    row_parts,
)
from edge_llm.kernels.pointers import call_1, call_2, call_3, call_5, i32_at, i64_at
from edge_llm.kernels.team import add_phase, run_phases

COMPUTE = types.int64(types.int64, types.int64)

_row_parts = numba.njit(row_parts)
_INVALID_ARGUMENT = 2  # ORT_INVALID_ARGUMENT
_WORD = 8


# --- talking to ONNX Runtime -----------------------------------------------------------------------------------------------


@numba.njit(inline="always")
def _refuse(state: Any) -> int:
    """An OrtStatus carrying the op's message."""
    return call_2(state[Op.CREATE_STATUS], _INVALID_ARGUMENT, state[Op.MESSAGE])


@numba.njit(inline="always")
def _input(op: int, context: int, state: Any, index: int) -> int:
    """Address of an input's data; its size in bytes is left in state[BYTES]. 0 on failure or for an empty tensor."""
    state[Op.POINTER] = 0
    state[Op.BYTES] = -1
    if call_3(state[Op.GET_INPUT], context, index, op + _WORD * Op.VALUE) != 0:
        return 0
    if call_2(state[Op.GET_BYTES], state[Op.VALUE], op + _WORD * Op.BYTES) != 0:
        return 0
    if call_2(state[Op.GET_DATA], state[Op.VALUE], op + _WORD * Op.POINTER) != 0:
        return 0
    return state[Op.POINTER]


@numba.njit(inline="always")
def _output(op: int, context: int, state: Any, index: int, rows: int, width: int) -> int:
    """Address of the data of an output of shape [rows, width]; 0 on failure or for an empty tensor."""
    state[Op.DIMENSIONS] = rows
    state[Op.DIMENSIONS + 1] = width
    state[Op.POINTER] = 0
    if call_5(state[Op.GET_OUTPUT], context, index, op + _WORD * Op.DIMENSIONS, 2, op + _WORD * Op.VALUE) != 0:
        return 0
    if call_2(state[Op.GET_DATA], state[Op.VALUE], op + _WORD * Op.POINTER) != 0:
        return 0
    return state[Op.POINTER]


@numba.njit(inline="always")
def _rows(state: Any, row_bytes: int, max_rows: int) -> int:
    """Rows of the input whose size is in state[BYTES], or -1 if it is no whole number of rows or too many."""
    size = state[Op.BYTES]
    if size < 0 or size % row_bytes != 0 or size // row_bytes > max_rows:
        return -1
    return size // row_bytes


@numba.njit
def _end(context: int, state: Any, workspace: Any) -> int:
    """The op has added its phases: run them all if its result is read now, or if the list is full. An OrtStatus*."""
    room = workspace[Workspace.MAX_PHASES] - workspace[Workspace.PHASE_COUNT]
    if state[Op.READ_OUTSIDE] == 0 and room >= PHASES_OF_AN_OP:
        return 0
    return run_phases(context, workspace, state[Op.WORKSPACE], state[Op.PARALLEL_FOR])


# --- the ops ---------------------------------------------------------------------------------------------------------------


def block_linear(op: int, context: int) -> int:
    """BlockLinear(x [rows, inputs], codes, scales, bias?) -> [rows, outputs]."""
    state = i64_at(op, OP_FIELDS)
    workspace = i64_at(state[Op.WORKSPACE], WORKSPACE_FIELDS)
    call = op + _WORD * Op.CALL
    fields = state[Op.CALL :]
    inputs, outputs = state[Op.ATTRIBUTE + LinearOp.INPUTS], state[Op.ATTRIBUTE + LinearOp.OUTPUTS]
    x = _input(op, context, state, 0)
    rows = _rows(state, 4 * inputs, workspace[Workspace.MAX_ROWS])
    if rows < 0 or inputs > workspace[Workspace.X_INPUTS]:
        return _refuse(state)
    out = _output(op, context, state, 0, rows, outputs)
    if rows == 0:
        return 0
    if x == 0 or out == 0:
        return _refuse(state)
    fields[LinearCall.X] = x
    fields[LinearCall.OUT] = out
    fields[LinearCall.ROWS] = rows
    fields[LinearCall.INPUTS] = inputs
    fields[LinearCall.OUTPUTS] = outputs
    fields[LinearCall.BITS] = state[Op.ATTRIBUTE + LinearOp.BITS]
    fields[LinearCall.BLOCK] = state[Op.ATTRIBUTE + LinearOp.BLOCK]
    fields[LinearCall.HAS_MINIMUM] = state[Op.ATTRIBUTE + LinearOp.HAS_MINIMUM]
    fields[LinearCall.CODES] = state[Op.FIRST_CONSTANT + 1]
    fields[LinearCall.SCALES] = state[Op.FIRST_CONSTANT + 2]
    fields[LinearCall.BIAS] = state[Op.FIRST_CONSTANT + 3]
    fields[LinearCall.X_BLOCKS] = workspace[Workspace.X_BLOCKS]
    fields[LinearCall.THREADS] = workspace[Workspace.THREADS]
    tasks = call_1(state[Op.PLAN], call)
    parts = fields[LinearCall.PARTS]
    add_phase(workspace, state[Op.FIRST_PHASE], call, rows * parts, Items.ROWS, 0, 0)
    codes, nbytes = state[Op.FIRST_CONSTANT + 1], inputs * outputs * state[Op.ATTRIBUTE + LinearOp.BITS] // 8
    add_phase(workspace, state[Op.SECOND_PHASE], call, tasks, Items.TASKS, codes, nbytes)
    return _end(context, state, workspace)


def block_embedding(op: int, context: int) -> int:
    """BlockEmbedding(ids [rows], codes, scales) -> [rows, inputs], times the attribute `scale`."""
    state = i64_at(op, OP_FIELDS)
    workspace = i64_at(state[Op.WORKSPACE], WORKSPACE_FIELDS)
    call = op + _WORD * Op.CALL
    fields = state[Op.CALL :]
    inputs, outputs = state[Op.ATTRIBUTE + LinearOp.INPUTS], state[Op.ATTRIBUTE + LinearOp.OUTPUTS]
    ids = _input(op, context, state, 0)
    rows = _rows(state, 8, workspace[Workspace.MAX_ROWS])
    if rows < 0:
        return _refuse(state)
    out = _output(op, context, state, 0, rows, inputs)
    if rows == 0:
        return 0
    if ids == 0 or out == 0:
        return _refuse(state)
    values = i64_at(ids, rows)
    for row in range(rows):
        if values[row] < 0 or values[row] >= outputs:
            return _refuse(state)
    fields[EmbeddingCall.IDS] = ids
    fields[EmbeddingCall.OUT] = out
    fields[EmbeddingCall.ROWS] = rows
    fields[EmbeddingCall.INPUTS] = inputs
    fields[EmbeddingCall.OUTPUTS] = outputs
    fields[EmbeddingCall.BITS] = state[Op.ATTRIBUTE + LinearOp.BITS]
    fields[EmbeddingCall.BLOCK] = state[Op.ATTRIBUTE + LinearOp.BLOCK]
    fields[EmbeddingCall.HAS_MINIMUM] = state[Op.ATTRIBUTE + LinearOp.HAS_MINIMUM]
    fields[EmbeddingCall.CODES] = state[Op.FIRST_CONSTANT + 1]
    fields[EmbeddingCall.SCALES] = state[Op.FIRST_CONSTANT + 2]
    fields[EmbeddingCall.SCALE] = state[Op.ATTRIBUTE + LinearOp.SCALE]
    add_phase(workspace, state[Op.FIRST_PHASE], call, rows, Items.ROWS, 0, 0)
    return _end(context, state, workspace)


def rms_norm(op: int, context: int) -> int:
    """RmsNorm(x [rows, width], gamma) -> [rows, width]."""
    return _norm(op, context, False)


def add_rms_norm(op: int, context: int) -> int:
    """AddRmsNorm(residual, delta [rows, width], gamma) -> (normed, sum)."""
    return _norm(op, context, True)


@numba.njit
def _norm(op: int, context: int, with_delta: bool) -> int:
    state = i64_at(op, OP_FIELDS)
    workspace = i64_at(state[Op.WORKSPACE], WORKSPACE_FIELDS)
    call = op + _WORD * Op.CALL
    fields = state[Op.CALL :]
    width = state[Op.ATTRIBUTE + NormOp.WIDTH]
    x = _input(op, context, state, 0)
    rows = _rows(state, 4 * width, workspace[Workspace.MAX_ROWS])
    if rows < 0:
        return _refuse(state)
    fields[NormCall.X] = x
    fields[NormCall.DELTA] = 0
    fields[NormCall.SUM] = 0
    if with_delta:
        fields[NormCall.DELTA] = _input(op, context, state, 1)
        if state[Op.BYTES] != 4 * width * rows:
            return _refuse(state)
        fields[NormCall.SUM] = _output(op, context, state, 1, rows, width)
    fields[NormCall.OUT] = _output(op, context, state, 0, rows, width)
    if rows == 0:
        return 0
    if (
        x == 0
        or fields[NormCall.OUT] == 0
        or (with_delta and (fields[NormCall.DELTA] == 0 or fields[NormCall.SUM] == 0))
    ):
        return _refuse(state)
    fields[NormCall.GAMMA] = state[Op.FIRST_CONSTANT + (2 if with_delta else 1)]
    fields[NormCall.ROWS] = rows
    fields[NormCall.WIDTH] = width
    fields[NormCall.GROUP] = state[Op.ATTRIBUTE + NormOp.GROUP]
    fields[NormCall.EPS] = state[Op.ATTRIBUTE + NormOp.EPS]
    add_phase(workspace, state[Op.FIRST_PHASE], call, rows, Items.ROWS, 0, 0)
    return _end(context, state, workspace)


def gated_activation(op: int, context: int) -> int:
    """GatedActivation(gate_up [rows, 2 * width]) -> [rows, width]."""
    state = i64_at(op, OP_FIELDS)
    workspace = i64_at(state[Op.WORKSPACE], WORKSPACE_FIELDS)
    call = op + _WORD * Op.CALL
    fields = state[Op.CALL :]
    width = state[Op.ATTRIBUTE + ActivationOp.WIDTH]
    x = _input(op, context, state, 0)
    rows = _rows(state, 8 * width, workspace[Workspace.MAX_ROWS])
    if rows < 0:
        return _refuse(state)
    out = _output(op, context, state, 0, rows, width)
    if rows == 0:
        return 0
    if x == 0 or out == 0:
        return _refuse(state)
    fields[ActivationCall.X] = x
    fields[ActivationCall.OUT] = out
    fields[ActivationCall.ROWS] = rows
    fields[ActivationCall.WIDTH] = width
    fields[ActivationCall.KIND] = state[Op.ATTRIBUTE + ActivationOp.KIND]
    parts = _row_parts(rows, width)
    fields[ActivationCall.PARTS] = parts
    add_phase(workspace, state[Op.FIRST_PHASE], call, rows * parts, Items.ROWS, 0, 0)
    return _end(context, state, workspace)


@numba.njit
def _segments_are_sound(segments: Any, count: int, rows: int, cache: Any) -> bool:
    """Segments follow one another, cover the step, begin where their slots end, and have room there."""
    lengths = i64_at(cache[Cache.LENGTHS], cache[Cache.SLOTS])
    expected = 0
    for i in range(count):
        slot, first, n, position = segments[4 * i], segments[4 * i + 1], segments[4 * i + 2], segments[4 * i + 3]
        if slot < 0 or slot >= cache[Cache.SLOTS] or n < 0 or first != expected:
            return False
        if position != lengths[slot] or position + n > cache[Cache.LIMIT]:
            return False  # further back, a ring may have lost rows
        expected += n
    return expected == rows


@numba.njit
def _note_written(segments: Any, count: int, cache: Any) -> int:
    """Raise WRITTEN of the step's slots; the end of the rows that lie furthest."""
    written = i64_at(cache[Cache.WRITTEN], cache[Cache.SLOTS])
    furthest = 0
    for i in range(count):
        slot, n, position = segments[4 * i], segments[4 * i + 2], segments[4 * i + 3]
        if n > 0:
            written[slot] = max(written[slot], position + n)
            furthest = max(furthest, position + n)
    return furthest


def ring_attention(op: int, context: int) -> int:
    """RingAttention(qkv, segments, rope, kv, q_norm?, k_norm?) -> [rows, heads * head_dim]; writes the layer's rows.

    `rope` is float32 [2 * tables, rows, rotary_dim]: each row's own entries, then those of its queries against sinks,
    which are only read in a step that has a row past the context.
    """
    state = i64_at(op, OP_FIELDS)
    workspace = i64_at(state[Op.WORKSPACE], WORKSPACE_FIELDS)
    call = op + _WORD * Op.CALL
    fields = state[Op.CALL :]
    attribute = Op.ATTRIBUTE
    heads, kv_heads = state[attribute + AttentionOp.HEADS], state[attribute + AttentionOp.KV_HEADS]
    head_dim, rotary_dim = state[attribute + AttentionOp.HEAD_DIM], state[attribute + AttentionOp.ROTARY_DIM]
    max_rows = workspace[Workspace.MAX_ROWS]

    qkv = _input(op, context, state, 0)
    rows = _rows(state, 4 * (heads + 2 * kv_heads) * head_dim, max_rows)
    segments = _input(op, context, state, 1)
    segment_count = _rows(state, 16, max_rows)
    rope = _input(op, context, state, 2)
    rope_bytes = state[Op.BYTES]
    kv = _input(op, context, state, 3)
    if rows < 0 or segment_count < 0 or kv == 0 or state[Op.BYTES] != _WORD:
        return _refuse(state)
    tables, table = state[attribute + AttentionOp.ROPE_TABLES], state[attribute + AttentionOp.ROPE_TABLE]
    if rope_bytes != 4 * 2 * tables * rows * rotary_dim:
        return _refuse(state)
    descriptor = i64_at(kv, 1)[0]
    if descriptor != workspace[Workspace.CACHE]:
        return _refuse(state)
    layer = state[attribute + AttentionOp.LAYER]
    cache = i64_at(descriptor, Cache.FIRST_LAYER)
    if cache[Cache.MAGIC] != CACHE_MAGIC or cache[Cache.VERSION] != CACHE_VERSION or layer >= cache[Cache.LAYERS]:
        return _refuse(state)
    layer_address = descriptor + _WORD * (Cache.FIRST_LAYER + LAYER_FIELDS * layer)
    record = i64_at(layer_address, LAYER_FIELDS)
    if record[CacheLayer.KV_HEADS] != kv_heads or record[CacheLayer.HEAD_DIM] != head_dim:
        return _refuse(state)
    window = state[attribute + AttentionOp.WINDOW]
    if record[CacheLayer.WINDOW] != window and (window != UNBOUNDED or record[CacheLayer.WINDOW] < 1):
        return _refuse(state)
    out = _output(op, context, state, 0, rows, heads * head_dim)
    if rows == 0:
        return 0
    if qkv == 0 or segments == 0 or out == 0:
        return _refuse(state)
    table_of_segments = i32_at(segments, 4 * segment_count)
    if not _segments_are_sound(table_of_segments, segment_count, rows, cache):
        return _refuse(state)

    fields[AttentionCall.QKV] = qkv
    fields[AttentionCall.OUT] = out
    fields[AttentionCall.ROWS] = rows
    fields[AttentionCall.SEGMENTS] = segments
    fields[AttentionCall.SEGMENT_COUNT] = segment_count
    fields[AttentionCall.ROPE] = 0 if table < 0 else rope + 4 * table * rows * rotary_dim
    fields[AttentionCall.ROTARY_DIM] = rotary_dim
    fields[AttentionCall.LAYER] = layer_address
    fields[AttentionCall.HEADS] = heads
    fields[AttentionCall.KV_HEADS] = kv_heads
    fields[AttentionCall.HEAD_DIM] = head_dim
    fields[AttentionCall.Q_NORM] = state[Op.FIRST_CONSTANT + 4]
    fields[AttentionCall.K_NORM] = state[Op.FIRST_CONSTANT + 5]
    fields[AttentionCall.SCALE] = state[attribute + AttentionOp.SCALE]
    fields[AttentionCall.SOFTCAP] = state[attribute + AttentionOp.SOFTCAP]
    fields[AttentionCall.EPS] = state[attribute + AttentionOp.EPS]
    fields[AttentionCall.SCRATCH] = workspace[Workspace.ATTENTION_SCRATCH]
    fields[AttentionCall.SCRATCH_BYTES] = workspace[Workspace.ATTENTION_SCRATCH_BYTES]
    fields[AttentionCall.THREADS] = workspace[Workspace.THREADS]
    fields[AttentionCall.SINK_ROPE] = 0
    fields[AttentionCall.SEGMENT_RECORDS] = state[attribute + AttentionOp.SEGMENT_RECORDS]
    tasks = call_1(state[Op.PLAN], call)
    if tasks < 0:
        return _refuse(state)
    furthest = _note_written(table_of_segments, segment_count, cache)
    sinks = record[CacheLayer.SINKS]
    if sinks > 0 and table >= 0 and furthest > sinks + record[CacheLayer.WINDOW]:
        fields[AttentionCall.SINK_ROPE] = rope + 4 * (tables + table) * rows * rotary_dim
    merges = fields[AttentionCall.MERGES]
    # One row's tasks are its heads, unless they are cut by splits.
    items = Items.HEADS if rows == 1 and tasks == kv_heads and merges == 0 else Items.TASKS
    add_phase(workspace, state[Op.FIRST_PHASE], call, rows * kv_heads, items, 0, 0)
    add_phase(workspace, state[Op.SECOND_PHASE], call, tasks, items, 0, 0)
    add_phase(workspace, state[Op.THIRD_PHASE], call, merges, Items.TASKS, 0, 0)
    return _end(context, state, workspace)


def ignore(op: int) -> None:
    """KernelDestroy: the session owns the state. Compiled, for it may be called when Python is gone."""


ENTRIES = {
    "block_linear": (COMPUTE, block_linear),
    "block_embedding": (COMPUTE, block_embedding),
    "rms_norm": (COMPUTE, rms_norm),
    "add_rms_norm": (COMPUTE, add_rms_norm),
    "gated_activation": (COMPUTE, gated_activation),
    "ring_attention": (COMPUTE, ring_attention),
    "ignore": (types.void(types.int64), ignore),
}
