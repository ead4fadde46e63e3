"""ONNX Runtime's C API through ctypes: just what a ring session needs, without importing the Python package.

Every onnxruntime wheel carries the plain library. Its `OrtApi` is a table of functions whose order is stable: entries are
only ever added (onnxruntime_c_api.h), so each is known by its index.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import POINTER, addressof, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from edge_llm.errors import SessionError

API_VERSION = 24
OLDEST_TESTED = (1, 30)
"""oldest release that this module is tested with: its table must hold every entry below"""


_LOG_FATAL = 4
"""severity below which ONNX Runtime says nothing: its log would print names out of the model past our terminal filter,
and every error comes back as a status anyway"""


class ApiEntry(IntEnum):
    """Index of each function we use in the OrtApi table of version 24."""

    CREATE_STATUS = 0
    GET_ERROR_MESSAGE = 2
    CREATE_ENV = 3
    DISABLE_TELEMETRY = 6
    CREATE_SESSION = 7
    CREATE_SESSION_OPTIONS = 10
    DISABLE_MEM_PATTERN = 17
    ENABLE_CPU_MEM_ARENA = 18
    SET_GRAPH_OPTIMIZATION_LEVEL = 23
    SET_INTRA_OP_THREADS = 24
    CREATE_CUSTOM_OP_DOMAIN = 26
    CUSTOM_OP_DOMAIN_ADD = 27
    ADD_CUSTOM_OP_DOMAIN = 28
    CREATE_TENSOR_WITH_DATA = 49
    GET_TENSOR_MUTABLE_DATA = 51
    CREATE_CPU_MEMORY_INFO = 69
    KERNEL_ATTRIBUTE_FLOAT = 85
    KERNEL_ATTRIBUTE_INT64 = 86
    KERNEL_GET_INPUT = 90
    KERNEL_GET_OUTPUT = 91
    RELEASE_STATUS = 93
    RELEASE_MEMORY_INFO = 94
    RELEASE_SESSION = 95
    RELEASE_VALUE = 96
    RELEASE_SESSION_OPTIONS = 100
    RELEASE_CUSTOM_OP_DOMAIN = 101
    ADD_SESSION_CONFIG = 130
    RUN_WITH_BINDING = 133
    CREATE_IO_BINDING = 134
    RELEASE_IO_BINDING = 135
    BIND_INPUT = 136
    BIND_OUTPUT = 137
    KERNEL_OUTPUT_NAME = 233
    KERNEL_CONSTANT_INPUT = 249
    KERNEL_PARALLEL_FOR = 274
    GET_TENSOR_BYTES = 318


class ElementType(IntEnum):
    """ONNXTensorElementDataType of the tensors we bind."""

    FLOAT = 1
    UINT8 = 2
    INT32 = 6
    INT64 = 7
    FLOAT16 = 10


class _ApiBase(ctypes.Structure):
    _fields_ = (
        ("GetApi", ctypes.CFUNCTYPE(c_void_p, c_uint32)),
        ("GetVersionString", ctypes.CFUNCTYPE(c_char_p)),
    )


def library_path() -> Path:
    """The plain ONNX Runtime library of the installed wheel. Raises `SessionError` if there is none."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise SessionError("onnxruntime is not installed", hint="pip install onnxruntime")
    folder = Path(spec.origin).parent / "capi"
    for pattern in ("libonnxruntime.so*", "libonnxruntime.*.dylib", "libonnxruntime.dylib", "onnxruntime.dll"):
        for path in sorted(folder.glob(pattern)):
            return path
    raise SessionError(
        "the installed onnxruntime has no plain library", hint="pip install --force-reinstall onnxruntime"
    )


def forbid_telemetry() -> None:
    """Keep ONNX Runtime from writing a device id and starting its telemetry thread, which it does when it is loaded.

    DisableTelemetryEvents comes too late for that: by then the files lie in the user's home.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


class OrtApi:
    """The function table, and calls that turn an OrtStatus into `SessionError`."""

    def __init__(self, path: Path) -> None:
        forbid_telemetry()
        self._library = ctypes.CDLL(str(path))
        get_base = self._library.OrtGetApiBase
        get_base.restype = POINTER(_ApiBase)
        base = get_base().contents
        self.version: str = base.GetVersionString().decode()
        table = base.GetApi(API_VERSION) if _release(self.version) >= OLDEST_TESTED else None
        if not table:
            oldest = ".".join(map(str, OLDEST_TESTED))
            raise SessionError(
                f"onnxruntime {self.version} is too old; {oldest} or newer is needed", hint="pip install -U onnxruntime"
            )
        self._table = (c_void_p * (max(ApiEntry) + 1)).from_address(table)
        self._message = ctypes.CFUNCTYPE(c_char_p, c_void_p)(self.address(ApiEntry.GET_ERROR_MESSAGE))
        self._release_status = ctypes.CFUNCTYPE(None, c_void_p)(self.address(ApiEntry.RELEASE_STATUS))

    def address(self, entry: ApiEntry) -> int:
        """Address of one function of the table."""
        address = self._table[entry]
        assert address is not None
        return address

    def function(self, entry: ApiEntry, *argument_types: Any) -> Any:
        """The function as a callable returning the raw status (0: well)."""
        return ctypes.CFUNCTYPE(c_void_p, *argument_types)(self.address(entry))

    def release(self, entry: ApiEntry, handle: int | None) -> None:
        """Call one of the Release functions."""
        if handle:
            ctypes.CFUNCTYPE(None, c_void_p)(self.address(entry))(handle)

    def check(self, status: int | None) -> None:
        """Raise `SessionError` with ONNX Runtime's own message if `status` is not 0."""
        if status:
            message = self._message(status).decode("utf-8", "replace")
            self._release_status(status)
            raise SessionError(f"ONNX Runtime: {' '.join(message.split())}")

    def create(self, entry: ApiEntry, *arguments: tuple[Any, Any]) -> int:
        """Call a function whose last parameter is the handle it makes; `arguments` are (ctypes type, value) pairs."""
        handle = c_void_p()
        types = [kind for kind, _ in arguments]
        self.check(self.function(entry, *types, POINTER(c_void_p))(*[value for _, value in arguments], byref(handle)))
        assert handle.value is not None
        return handle.value

    def call(self, entry: ApiEntry, *arguments: tuple[Any, Any]) -> None:
        """Call a function that only returns a status."""
        self.check(self.function(entry, *[kind for kind, _ in arguments])(*[value for _, value in arguments]))

    # --- typed shorthands ---

    def tensor(self, memory_info: int, address: int, nbytes: int, shape: tuple[int, ...], element: ElementType) -> int:
        """An OrtValue over memory of ours, which must outlive it."""
        dimensions = (c_int64 * max(len(shape), 1))(*shape)
        return self.create(
            ApiEntry.CREATE_TENSOR_WITH_DATA,
            (c_void_p, memory_info),
            (c_void_p, address),
            (c_size_t, nbytes),
            (c_void_p, addressof(dimensions)),
            (c_size_t, len(shape)),
            (c_int, element),
        )

    def attribute_int(self, info: int, name: str) -> int | None:
        """An int64 attribute of a node, or None if the node has none of that name."""
        value = c_int64()
        found = self.function(ApiEntry.KERNEL_ATTRIBUTE_INT64, c_void_p, c_char_p, c_void_p)
        return int(value.value) if self._found(found(info, name.encode(), addressof(value))) else None

    def attribute_float(self, info: int, name: str) -> float | None:
        """A float attribute of a node, or None if the node has none of that name."""
        value = c_float()
        found = self.function(ApiEntry.KERNEL_ATTRIBUTE_FLOAT, c_void_p, c_char_p, c_void_p)
        return float(value.value) if self._found(found(info, name.encode(), addressof(value))) else None

    def output_name(self, info: int, index: int) -> str:
        """Name of a node's output; empty for one that the node does not have."""
        size = c_size_t(0)
        name = self.function(ApiEntry.KERNEL_OUTPUT_NAME, c_void_p, c_size_t, c_void_p, c_void_p)
        if not self._found(name(info, index, None, addressof(size))):
            return ""
        text = ctypes.create_string_buffer(size.value)
        self.check(name(info, index, addressof(text), addressof(size)))
        return text.value.decode("utf-8", "replace")

    def constant(self, info: int, index: int) -> tuple[int, int] | None:
        """(address, bytes) of a constant input, or None where it is absent or not constant."""
        is_constant, value = c_int32(), c_void_p()
        function = self.function(ApiEntry.KERNEL_CONSTANT_INPUT, c_void_p, c_size_t, c_void_p, c_void_p)
        if not self._found(function(info, index, addressof(is_constant), addressof(value))):
            return None
        if not is_constant.value or not value.value:
            return None
        data, nbytes = c_void_p(), c_size_t()
        self.call(ApiEntry.GET_TENSOR_MUTABLE_DATA, (c_void_p, value), (c_void_p, addressof(data)))
        self.call(ApiEntry.GET_TENSOR_BYTES, (c_void_p, value), (c_void_p, addressof(nbytes)))
        return int(data.value or 0), int(nbytes.value)

    def status(self, message: str) -> int:
        """A new OrtStatus that a callback may return."""
        make = ctypes.CFUNCTYPE(c_void_p, c_int, c_char_p)(self.address(ApiEntry.CREATE_STATUS))
        return int(make(1, message.encode("utf-8", "replace")))

    def _found(self, status: int | None) -> bool:
        if status:
            self._release_status(status)
        return not status


def _release(version: str) -> tuple[int, int]:
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def encode_path(path: Path) -> Any:
    """(ctypes type, value) of a path as ORTCHAR_T*: wchar_t on Windows, bytes elsewhere."""
    return (ctypes.c_wchar_p, str(path)) if os.name == "nt" else (c_char_p, os.fsencode(path))


@cache
def ort_api() -> OrtApi:
    """The process's API table."""
    return OrtApi(library_path())


@cache
def environment() -> int:
    """The process's OrtEnv: silent, and telemetry is off."""
    env = ort_api().create(ApiEntry.CREATE_ENV, (c_int, _LOG_FATAL), (c_char_p, b"edge_llm"))
    ort_api().call(ApiEntry.DISABLE_TELEMETRY, (c_void_p, env))
    return env
