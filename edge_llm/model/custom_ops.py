"""The `edge_llm` ops as OrtCustomOp structs: cold callbacks in ctypes, compute functions by their compiled addresses.

CreateKernelV2 trusts nothing in the graph: it checks every constant's size against the node's attributes and the session's
workspace before a compute function will rely on them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Container
from ctypes import CFUNCTYPE, addressof, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from edge_llm.errors import EdgeLLMError, SessionError
from edge_llm.kernels.block_format import BlockFormat
from edge_llm.kernels.layout import (
    CACHE_MAGIC,
    LAYER_FIELDS,
    OP_FIELDS,
    SEGMENT_RECORD_BYTES,
    UNBOUNDED,
    Activation,
    ActivationOp,
    AttentionOp,
    Cache,
    CacheLayer,
    LinearOp,
    NormOp,
    Op,
    Workspace,
)
from edge_llm.model.ort_capi import ApiEntry, ElementType, OrtApi

DOMAIN = "edge_llm"

_STRUCT_VERSION = 16  # the first with CreateKernelV2 and KernelComputeV2
_REQUIRED, _OPTIONAL = 0, 1
_MAX_WIDTH = 1 << 24  # far above any model; keeps products of sizes inside int64


class Kernels(Protocol):
    """Where compiled functions come from: `kernels.warmup.KernelLibrary`."""

    def address(self, name: str) -> int: ...


class OrtCustomOp(ctypes.Structure):
    """onnxruntime_c_api.h, version 16 of the struct; the fields after KernelComputeV2 are never read at that version."""

    _fields_ = (
        ("version", c_uint32),
        ("CreateKernel", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p)),
        ("GetName", CFUNCTYPE(c_void_p, c_void_p)),
        ("GetExecutionProviderType", CFUNCTYPE(c_void_p, c_void_p)),
        ("GetInputType", CFUNCTYPE(c_int, c_void_p, c_size_t)),
        ("GetInputTypeCount", CFUNCTYPE(c_size_t, c_void_p)),
        ("GetOutputType", CFUNCTYPE(c_int, c_void_p, c_size_t)),
        ("GetOutputTypeCount", CFUNCTYPE(c_size_t, c_void_p)),
        ("KernelCompute", c_void_p),
        ("KernelDestroy", c_void_p),
        ("GetInputCharacteristic", CFUNCTYPE(c_int, c_void_p, c_size_t)),
        ("GetOutputCharacteristic", CFUNCTYPE(c_int, c_void_p, c_size_t)),
        ("GetInputMemoryType", CFUNCTYPE(c_int, c_void_p, c_size_t)),
        ("GetVariadicInputMinArity", CFUNCTYPE(c_int, c_void_p)),
        ("GetVariadicInputHomogeneity", CFUNCTYPE(c_int, c_void_p)),
        ("GetVariadicOutputMinArity", CFUNCTYPE(c_int, c_void_p)),
        ("GetVariadicOutputHomogeneity", CFUNCTYPE(c_int, c_void_p)),
        ("CreateKernelV2", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("KernelComputeV2", c_void_p),
        ("reserved", c_void_p * 16),
    )


_FIELD_TYPES: dict[str, Any] = {name: kind for name, kind, *_ in OrtCustomOp._fields_}


def float_bits(value: float) -> int:
    """The float64 as an int64, the way records carry it."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@dataclass
class Node:
    """What CreateKernelV2 may ask of the node it makes a kernel for. Every getter raises `SessionError` naming the op."""

    api: OrtApi
    info: int
    op: str

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.api.attribute_int(self.info, name)
        value = default if value is None else value
        if value is None or not low <= value <= high:
            raise SessionError(f"{self.op}: attribute {name} is {value}, not within {low} and {high}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.api.attribute_float(self.info, name)
        value = default if value is None else value
        if value is None or not np.isfinite(value):
            raise SessionError(f"{self.op}: attribute {name} is {value}")
        return value

    def constant(self, index: int, nbytes: int, *, optional: bool = False) -> int:
        """Address of a constant input of exactly `nbytes`; 0 where an optional one is absent."""
        found = self.api.constant(self.info, index)
        if found is None and optional:
            return 0
        if found is None or found[1] != nbytes or found[0] == 0:
            size = None if found is None else found[1]
            raise SessionError(f"{self.op}: constant input {index} has {size} bytes, not {nbytes}")
        return found[0]


Fill = Callable[["Node", np.ndarray, "SessionOps"], None]


@dataclass(frozen=True)
class OpSpec:
    """One op: element types of inputs and outputs, optional inputs, compiled functions, and how its state is filled."""

    name: str
    inputs: tuple[ElementType, ...]
    outputs: tuple[ElementType, ...]
    compute: str
    phases: tuple[str, ...]
    fill: Fill
    plan: str | None = None
    optional_inputs: frozenset[int] = field(default_factory=frozenset)
    message: str = ""


def _fill_linear(node: Node, state: np.ndarray, ops: SessionOps) -> None:
    inputs = node.integer("inputs", 32, _MAX_WIDTH)
    outputs = node.integer("outputs", 1, _MAX_WIDTH)
    form = BlockFormat(
        bits=node.integer("bits", 4, 8),
        block=node.integer("block", 16, 32),
        minimum=bool(node.integer("minimum", 0, 1)),
    )
    if inputs % 32 or inputs > ops.workspace[Workspace.X_INPUTS]:
        raise SessionError(f"{node.op}: {inputs} inputs are no multiple of 32 or more than the session has room for")
    attributes = state[Op.ATTRIBUTE :]
    attributes[LinearOp.INPUTS] = inputs
    attributes[LinearOp.OUTPUTS] = outputs
    attributes[LinearOp.BITS] = form.bits
    attributes[LinearOp.BLOCK] = form.block
    attributes[LinearOp.HAS_MINIMUM] = form.minimum
    state[Op.FIRST_CONSTANT + 1] = node.constant(1, form.code_bytes(outputs, inputs))
    state[Op.FIRST_CONSTANT + 2] = node.constant(2, form.scale_bytes(outputs, inputs))
    if node.op == "BlockEmbedding":
        attributes[LinearOp.SCALE] = float_bits(node.real("scale", 1.0))
    else:
        state[Op.FIRST_CONSTANT + 3] = node.constant(3, 4 * outputs, optional=True)


def _fill_norm(node: Node, state: np.ndarray, ops: SessionOps) -> None:
    width, group = node.integer("width", 1, _MAX_WIDTH), node.integer("group", 1, _MAX_WIDTH)
    if width % group:
        raise SessionError(f"{node.op}: group {group} does not divide width {width}")
    attributes = state[Op.ATTRIBUTE :]
    attributes[NormOp.WIDTH] = width
    attributes[NormOp.GROUP] = group
    attributes[NormOp.EPS] = float_bits(node.real("eps"))
    gamma = 2 if node.op == "AddRmsNorm" else 1
    state[Op.FIRST_CONSTANT + gamma] = node.constant(gamma, 4 * group)


def _fill_activation(node: Node, state: np.ndarray, ops: SessionOps) -> None:
    attributes = state[Op.ATTRIBUTE :]
    attributes[ActivationOp.WIDTH] = node.integer("width", 1, _MAX_WIDTH)
    attributes[ActivationOp.KIND] = node.integer("kind", min(Activation), max(Activation))


def _fill_attention(node: Node, state: np.ndarray, ops: SessionOps) -> None:
    cache = ops.cache
    layer = node.integer("layer", 0, int(cache[Cache.LAYERS]) - 1)
    record = cache[Cache.FIRST_LAYER + LAYER_FIELDS * layer :]
    heads, kv_heads = node.integer("heads", 1, 1024), node.integer("kv_heads", 1, 1024)
    head_dim = node.integer("head_dim", 8, 1024)
    window = node.integer("window", 1, UNBOUNDED, default=UNBOUNDED)
    rotary_dim = node.integer("rotary_dim", 0, head_dim)
    tables = node.integer("rope_tables", 0, 8)
    expected = [(CacheLayer.KV_HEADS, kv_heads), (CacheLayer.HEAD_DIM, head_dim)]
    if window < UNBOUNDED:  # the cache gives global layers a window of its own where it slides
        expected.append((CacheLayer.WINDOW, window))
    if any(record[name] != value for name, value in expected) or heads % kv_heads or head_dim % 8 or rotary_dim % 2:
        raise SessionError(f"{node.op}: layer {layer} does not fit the cache's geometry")
    attributes = state[Op.ATTRIBUTE :]
    attributes[AttentionOp.LAYER] = layer
    attributes[AttentionOp.HEADS] = heads
    attributes[AttentionOp.KV_HEADS] = kv_heads
    attributes[AttentionOp.HEAD_DIM] = head_dim
    attributes[AttentionOp.ROTARY_DIM] = rotary_dim
    attributes[AttentionOp.ROPE_TABLES] = tables
    attributes[AttentionOp.ROPE_TABLE] = node.integer("rope_table", -1, tables - 1)
    attributes[AttentionOp.WINDOW] = window
    attributes[AttentionOp.SCALE] = float_bits(node.real("scale"))
    attributes[AttentionOp.SOFTCAP] = float_bits(node.real("softcap", 0.0))
    attributes[AttentionOp.EPS] = float_bits(node.real("eps", 1e-6))
    attributes[AttentionOp.SEGMENT_RECORDS] = ops.memory(SEGMENT_RECORD_BYTES * int(ops.workspace[Workspace.MAX_ROWS]))
    state[Op.FIRST_CONSTANT + 4] = node.constant(4, 4 * head_dim, optional=True)
    state[Op.FIRST_CONSTANT + 5] = node.constant(5, 4 * head_dim, optional=True)


_F32, _I64, _U8, _F16 = ElementType.FLOAT, ElementType.INT64, ElementType.UINT8, ElementType.FLOAT16

SPECS = (
    OpSpec(
        name="BlockLinear",
        inputs=(_F32, _U8, _F16, _F32),
        outputs=(_F32,),
        compute="block_linear",
        plan="linear_plan",
        phases=("linear_quantise", "linear_task"),
        fill=_fill_linear,
        optional_inputs=frozenset({3}),
        message="BlockLinear: x is no whole number of rows, or has too many",
    ),
    OpSpec(
        name="BlockEmbedding",
        inputs=(_I64, _U8, _F16),
        outputs=(_F32,),
        compute="block_embedding",
        phases=("embedding_row",),
        fill=_fill_linear,
        message="BlockEmbedding: a token id lies outside the vocabulary, or there are too many rows",
    ),
    OpSpec(
        name="RmsNorm",
        inputs=(_F32, _F32),
        outputs=(_F32,),
        compute="rms_norm",
        phases=("norm_row",),
        fill=_fill_norm,
        message="RmsNorm: x is no whole number of rows, or has too many",
    ),
    OpSpec(
        name="AddRmsNorm",
        inputs=(_F32, _F32, _F32),
        outputs=(_F32, _F32),
        compute="add_rms_norm",
        phases=("add_norm_row",),
        fill=_fill_norm,
        message="AddRmsNorm: residual and delta are no whole number of rows of the same count",
    ),
    OpSpec(
        name="GatedActivation",
        inputs=(_F32,),
        outputs=(_F32,),
        compute="gated_activation",
        phases=("activation_part",),
        fill=_fill_activation,
        message="GatedActivation: x is no whole number of rows, or has too many",
    ),
    OpSpec(
        name="RingAttention",
        inputs=(_F32, ElementType.INT32, _F32, _I64, _F32, _F32),
        outputs=(_F32,),
        compute="ring_attention",
        plan="attention_plan",
        phases=("attention_prepare", "attention_task", "attention_merge"),
        fill=_fill_attention,
        optional_inputs=frozenset({4, 5}),
        message="RingAttention: segments, positions or sizes do not fit the cache",
    ),
)


class SessionOps:
    """The ops of one session and all memory that they point to; must outlive the session.

    `workspace` and `cache` are the int64 records of layout.Workspace and layout.Cache; `read_outside` names the outputs
    that something else than these ops reads.
    """

    def __init__(
        self, api: OrtApi, kernels: Kernels, workspace: np.ndarray, cache: np.ndarray, read_outside: Container[str]
    ) -> None:
        if cache[Cache.MAGIC] != CACHE_MAGIC:
            raise SessionError("the cache descriptor is not one")
        self.workspace, self.cache = workspace, cache
        self._api, self._kernels, self._read_outside = api, kernels, read_outside
        self.failure: BaseException | None = None
        """what a callback raised beyond a plain refusal, Ctrl-C among it"""
        self._states: list[np.ndarray] = []
        self._memory: list[np.ndarray] = []
        self._structs = [self._struct(spec) for spec in SPECS]

    @property
    def count(self) -> int:
        """How many ops the session has."""
        return len(self._states)

    def memory(self, nbytes: int) -> int:
        """Address of zeros that live as long as the ops; pages are only taken when touched."""
        self._memory.append(np.zeros(nbytes, np.uint8))
        return self._memory[-1].ctypes.data

    def register(self, options: int) -> int:
        """Add the domain to session options; gives the domain's handle, to be released after the session."""
        api = self._api
        domain = api.create(ApiEntry.CREATE_CUSTOM_OP_DOMAIN, (c_char_p, DOMAIN.encode()))
        for structure, *_ in self._structs:
            api.call(ApiEntry.CUSTOM_OP_DOMAIN_ADD, (c_void_p, domain), (c_void_p, addressof(structure)))
        api.call(ApiEntry.ADD_CUSTOM_OP_DOMAIN, (c_void_p, options), (c_void_p, domain))
        return domain

    def _struct(self, spec: OpSpec) -> tuple[Any, ...]:
        name = ctypes.create_string_buffer(spec.name.encode())
        message = ctypes.create_string_buffer(spec.message.encode())

        def create(op: int, api: int, info: int, kernel: int) -> int | None:
            try:
                state = self._state(spec, info, addressof(message))
            except EdgeLLMError as error:
                return self._api.status(str(error))
            except BaseException as error:  # nothing may be raised through C: whoever created the session raises it
                self.failure = error
                return self._api.status(f"{spec.name}: {error!r}")
            c_void_p.from_address(kernel).value = state.ctypes.data
            return None

        callbacks = {
            "CreateKernel": lambda op, api, info: None,
            "GetName": lambda op: addressof(name),
            "GetExecutionProviderType": lambda op: None,
            "GetInputType": lambda op, index: spec.inputs[index],
            "GetInputTypeCount": lambda op: len(spec.inputs),
            "GetOutputType": lambda op, index: spec.outputs[index],
            "GetOutputTypeCount": lambda op: len(spec.outputs),
            "GetInputCharacteristic": lambda op, index: _OPTIONAL if index in spec.optional_inputs else _REQUIRED,
            "GetOutputCharacteristic": lambda op, index: _REQUIRED,
            "GetInputMemoryType": lambda op, index: 0,
            "GetVariadicInputMinArity": lambda op: 0,
            "GetVariadicInputHomogeneity": lambda op: 0,
            "GetVariadicOutputMinArity": lambda op: 0,
            "GetVariadicOutputHomogeneity": lambda op: 0,
            "CreateKernelV2": create,
        }
        typed = {field_name: _FIELD_TYPES[field_name](function) for field_name, function in callbacks.items()}
        structure = OrtCustomOp(
            version=_STRUCT_VERSION,
            KernelComputeV2=self._kernels.address(spec.compute),
            KernelDestroy=self._kernels.address("ignore"),
            **typed,
        )
        return structure, typed, name, message

    def _state(self, spec: OpSpec, info: int, message: int) -> np.ndarray:
        state = np.zeros(OP_FIELDS, np.int64)
        for slot, entry in (
            (Op.GET_INPUT, ApiEntry.KERNEL_GET_INPUT),
            (Op.GET_OUTPUT, ApiEntry.KERNEL_GET_OUTPUT),
            (Op.GET_DATA, ApiEntry.GET_TENSOR_MUTABLE_DATA),
            (Op.GET_BYTES, ApiEntry.GET_TENSOR_BYTES),
            (Op.PARALLEL_FOR, ApiEntry.KERNEL_PARALLEL_FOR),
            (Op.CREATE_STATUS, ApiEntry.CREATE_STATUS),
        ):
            state[slot] = self._api.address(entry)
        state[Op.MESSAGE] = message
        state[Op.WORKSPACE] = self.workspace.ctypes.data
        if spec.plan is not None:
            state[Op.PLAN] = self._kernels.address(spec.plan)
        for i, phase in enumerate(spec.phases):
            state[Op.FIRST_PHASE + i] = self._kernels.address(phase)
        outputs = (self._api.output_name(info, index) for index in range(len(spec.outputs)))
        state[Op.READ_OUTSIDE] = any(name in self._read_outside for name in outputs)
        spec.fill(Node(self._api, info, spec.name), state, self)
        self._states.append(state)
        return state
