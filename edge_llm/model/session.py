"""Session: the one place where a ring graph runs. `forward(step) -> logits`; nothing else is asked of a model.

The KV cache is neither input nor output of the graph: its descriptor's address is handed in, and RingAttention reads and
writes the rows. A step writes rows past the committed length; whoever owns the cache commits them.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_void_p
from pathlib import Path

import numpy as np

from edge_llm.config import EngineConfig
from edge_llm.errors import SessionError
from edge_llm.kernels.layout import (
    PHASE_FIELDS,
    PHASES_OF_AN_OP,
    WORKSPACE_FIELDS,
    Workspace,
    attention_scratch_bytes,
    quantised_bytes,
)
from edge_llm.machine import yield_address
from edge_llm.model.cache_descriptor import CacheDescriptor
from edge_llm.model.custom_ops import Kernels, SessionOps
from edge_llm.model.graph_check import check_graph
from edge_llm.model.manifest import GRAPH_NAME, ModelManifest
from edge_llm.model.ort_capi import ApiEntry, ElementType, OrtApi, encode_path, environment, ort_api
from edge_llm.model.rope import RopeRows
from edge_llm.model.step import Step

_Tensor = tuple[np.ndarray, tuple[int, ...], ElementType]

_KEPT_BINDINGS = 64
_ALIGNMENT = 64


def aligned_zeros(nbytes: int) -> np.ndarray:
    """uint8 [nbytes], 64-byte aligned; pages are only taken when touched."""
    buffer = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes]


class Session:
    """A loaded model over one KV cache. Not thread-safe: one step at a time."""

    def __init__(
        self,
        folder: Path,
        manifest: ModelManifest,
        *,
        kernels: Kernels,
        cache_descriptor: int,
        max_rows: int,
        threads: int,
        takes_turns: bool = False,
        spin_us: int = EngineConfig.spin_us,
    ) -> None:
        """Load the graph of a model folder.

        `cache_descriptor` is the address of a KVCache's descriptor, which must outlive the session; `max_rows` bounds the
        rows of a step; `threads` is the size of the thread pool, the caller's thread included, of which idle ones look for
        work for `spin_us` microseconds before they sleep. One that `takes_turns` with another session leaves it the
        processors after each step: none of its threads looks for more work.

        Raises `ModelFormatError` for a graph that is not one of ours, `SessionError` if ONNX Runtime refuses it or the
        cache's rings have no room for such steps.
        """
        self.manifest = manifest
        self.max_rows = max_rows
        self.vocab = manifest.dimensions.vocab
        self.hidden = manifest.dimensions.hidden
        read_outside = check_graph(folder, manifest)
        self._api: OrtApi = ort_api()
        self._cache = CacheDescriptor(cache_descriptor)
        if self._cache.max_rows < max_rows:
            raise SessionError(f"the cache has room for steps of {self._cache.max_rows} rows, not {max_rows}")
        self._workspace, self._buffers = self._allocate_workspace(kernels, threads)
        self._ops = SessionOps(self._api, kernels, self._workspace, self._cache.record, read_outside)
        self._session, self._domain = self._create(folder / GRAPH_NAME, threads, takes_turns, spin_us)
        self._allocate_phases()
        self._memory_info = self._api.create(ApiEntry.CREATE_CPU_MEMORY_INFO, (c_int, 0), (c_int, 0))
        self._run = self._api.function(ApiEntry.RUN_WITH_BINDING, c_void_p, c_void_p, c_void_p)
        self._bindings: OrderedDict[tuple[int, int, int], _Binding] = OrderedDict()

        self._ids = np.zeros(max_rows, np.int64)
        self._segments = np.zeros(4 * max_rows, np.int32)
        self._rope_rows = RopeRows(manifest.rope)
        self._tables = len(manifest.rope)
        self._rotary_dim = manifest.rope[0].rotary_dim if manifest.rope else 0
        self._rope = np.zeros(max(2 * self._tables * max_rows * self._rotary_dim, 1), np.float32)
        self._logit_rows = np.zeros(max_rows, np.int64)
        self._kv = np.array(cache_descriptor, np.int64)
        self._logits = np.empty(max_rows * self.vocab, np.float32)
        self._hidden = np.empty(max_rows * self.hidden, np.float32)

    def forward(self, step: Step) -> np.ndarray:
        """Run one step: float32 [step.logit_rows, vocab], a view that the next call overwrites.

        Rows of a segment go to cache rows position, position + 1, ... of its slot, whose committed length `position` is.
        Raises `SessionError` for a step that the cache or the session has no room for.
        """
        self._check(step)
        binding = self._binding(step.rows, len(step.segments), step.logit_rows)
        self._fill(step)
        self._workspace[Workspace.PHASE_COUNT] = 0  # a step that failed leaves some
        self._api.check(self._run(self._session, None, binding.handle))
        return self._logits[: step.logit_rows * self.vocab].reshape(step.logit_rows, self.vocab)

    def hidden_states(self, rows: int) -> np.ndarray:
        """float32 [rows, hidden]: the last step's rows after the final norm; a view that the next step overwrites."""
        return self._hidden[: rows * self.hidden].reshape(rows, self.hidden)

    def close(self) -> None:
        """Free the graph; idempotent. The cache belongs to its owner."""
        if not self._session:
            return
        for binding in self._bindings.values():
            binding.release(self._api)
        self._bindings.clear()
        self._api.release(ApiEntry.RELEASE_SESSION, self._session)
        self._api.release(ApiEntry.RELEASE_CUSTOM_OP_DOMAIN, self._domain)
        self._api.release(ApiEntry.RELEASE_MEMORY_INFO, self._memory_info)
        self._session = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- a step ---

    def _check(self, step: Step) -> None:
        if not self._session:
            raise SessionError("the session is closed")
        if not 0 < step.rows <= self.max_rows:
            raise SessionError(f"a step has {step.rows} rows, the session takes 1 to {self.max_rows}")
        slots = [segment.slot for segment in step.segments]
        if len(set(slots)) != len(slots):
            raise SessionError("a step has two segments of one slot")
        if any(not 0 <= segment.logit_rows <= segment.rows for segment in step.segments):
            raise SessionError("a segment wants logits of more rows than it has")

    def _fill(self, step: Step) -> None:
        """Write the graph's inputs."""
        rows, first, wanted = step.rows, 0, 0
        positions = np.empty(rows, np.int64)
        for i, segment in enumerate(step.segments):
            n, end = segment.rows, first + segment.rows
            self._ids[first:end] = segment.token_ids
            positions[first:end] = np.arange(segment.position, segment.position + n)
            self._segments[4 * i : 4 * i + 4] = (segment.slot, first, n, segment.position)
            self._logit_rows[wanted : wanted + segment.logit_rows] = np.arange(end - segment.logit_rows, end)
            first, wanted = end, wanted + segment.logit_rows
        self._fill_rope(positions)

    def _fill_rope(self, positions: np.ndarray) -> None:
        """Each row's own entries, and where a row has slid those of its queries against sinks: as if it were the last
        row that attends to everything (StreamingLLM, arXiv:2309.17453: positions inside the cache)."""
        entries = self._rope[: 2 * self._tables * len(positions) * self._rotary_dim]
        own, sink = entries.reshape(2, self._tables, len(positions), self._rotary_dim)
        self._rope_rows.fill(positions, own)
        if positions.max() >= self._cache.sink_context:
            self._rope_rows.fill(np.minimum(positions, self._cache.sink_context - 1), sink)

    def _binding(self, rows: int, segments: int, logit_rows: int) -> _Binding:
        """The IO binding for these shapes; decode steps of one conversation use the same one for ever."""
        key = (rows, segments, logit_rows)
        binding = self._bindings.get(key)
        if binding is None:
            if len(self._bindings) >= _KEPT_BINDINGS:
                self._bindings.popitem(last=False)[1].release(self._api)
            binding = self._bindings[key] = self._bind(rows, segments, logit_rows)
        self._bindings.move_to_end(key)
        return binding

    def _bind(self, rows: int, segments: int, logit_rows: int) -> _Binding:
        inputs: dict[str, _Tensor] = {
            "input_ids": (self._ids, (rows,), ElementType.INT64),
            "segments": (self._segments, (segments, 4), ElementType.INT32),
            "rope": (self._rope, (2 * self._tables, rows, self._rotary_dim), ElementType.FLOAT),
            "logit_rows": (self._logit_rows, (logit_rows,), ElementType.INT64),
            "kv": (self._kv, (), ElementType.INT64),
        }
        outputs: dict[str, _Tensor] = {
            "logits": (self._logits, (logit_rows, self.vocab), ElementType.FLOAT),
            "hidden": (self._hidden, (rows, self.hidden), ElementType.FLOAT),
        }
        api = self._api
        binding = _Binding(api.create(ApiEntry.CREATE_IO_BINDING, (c_void_p, self._session)))
        for bind, tensors in ((ApiEntry.BIND_INPUT, inputs), (ApiEntry.BIND_OUTPUT, outputs)):
            for name, (array, shape, element) in tensors.items():
                nbytes = array.itemsize * int(np.prod(shape, dtype=np.int64))
                value = api.tensor(self._memory_info, array.ctypes.data, nbytes, shape, element)
                binding.values.append(value)
                api.call(bind, (c_void_p, binding.handle), (c_char_p, name.encode()), (c_void_p, value))
        return binding

    # --- loading ---

    def _allocate_phases(self) -> None:
        """Room for all that one step does."""
        phases = PHASES_OF_AN_OP * self._ops.count
        self._buffers.append(aligned_zeros(8 * PHASE_FIELDS * phases))
        self._workspace[Workspace.PHASES] = self._buffers[-1].ctypes.data
        self._workspace[Workspace.MAX_PHASES] = phases

    def _allocate_workspace(self, kernels: Kernels, threads: int) -> tuple[np.ndarray, list[np.ndarray]]:
        size, rows = self.manifest.dimensions, self.max_rows
        inputs = max(size.hidden, size.intermediate, size.heads * size.head_dim)
        scratch = attention_scratch_bytes(
            max_rows=rows,
            heads=size.heads,
            head_dim=size.head_dim,
            capacity=self._cache.capacity,
        )
        blocks = aligned_zeros(quantised_bytes(rows, inputs))
        attention = aligned_zeros(scratch)
        workspace = np.zeros(WORKSPACE_FIELDS, np.int64)
        workspace[Workspace.MAX_ROWS] = rows
        workspace[Workspace.THREADS] = threads
        workspace[Workspace.CACHE] = self._cache.record.ctypes.data
        workspace[Workspace.X_BLOCKS] = blocks.ctypes.data
        workspace[Workspace.X_INPUTS] = inputs
        workspace[Workspace.ATTENTION_SCRATCH] = attention.ctypes.data
        workspace[Workspace.ATTENTION_SCRATCH_BYTES] = scratch
        workspace[Workspace.TEAM] = kernels.address("team_run")
        workspace[Workspace.YIELD] = yield_address()
        return workspace, [blocks, attention]

    def _create(self, graph: Path, threads: int, takes_turns: bool, spin_us: int) -> tuple[int, int]:
        api = self._api
        options = api.create(ApiEntry.CREATE_SESSION_OPTIONS)
        domain = 0
        try:
            api.call(ApiEntry.SET_INTRA_OP_THREADS, (c_void_p, options), (c_int, threads))
            api.call(ApiEntry.SET_GRAPH_OPTIMIZATION_LEVEL, (c_void_p, options), (c_int, 0))
            # Phases run when ONNX Runtime has given back what they read and write, and nothing else has had it since: it
            # stays memory of this session's own arena, which is never made smaller.
            api.call(ApiEntry.ENABLE_CPU_MEM_ARENA, (c_void_p, options))
            # Patterns are kept for every shape that a step ever had: memory without end, for nothing measurable.
            api.call(ApiEntry.DISABLE_MEM_PATTERN, (c_void_p, options))
            for key, value in {
                "session.intra_op.allow_spinning": "1" if spin_us else "0",
                "session.intra_op.spin_duration_us": str(spin_us),
                "session.force_spinning_stop": str(int(takes_turns)),
                "session.disable_prepacking": "1",  # nothing to repack: weights are stored as the kernels read them
            }.items():
                api.call(
                    ApiEntry.ADD_SESSION_CONFIG,
                    (c_void_p, options),
                    (c_char_p, key.encode()),
                    (c_char_p, value.encode()),
                )
            domain = self._ops.register(options)
            with _interrupts_later():
                session = api.create(
                    ApiEntry.CREATE_SESSION, (c_void_p, environment()), encode_path(graph), (c_void_p, options)
                )
        except BaseException as error:
            api.release(ApiEntry.RELEASE_CUSTOM_OP_DOMAIN, domain)
            raise self._ops.failure or error from None
        finally:
            api.release(ApiEntry.RELEASE_SESSION_OPTIONS, options)
        return session, domain


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C waits. An exception inside a callback of ONNX Runtime's is lost there, and an op would be half made."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(signal.SIGINT, None)


class _Binding:
    """An IO binding and the values bound to it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.values: list[int] = []

    def release(self, api: OrtApi) -> None:
        api.release(ApiEntry.RELEASE_IO_BINDING, self.handle)
        for value in self.values:
            api.release(ApiEntry.RELEASE_VALUE, value)
