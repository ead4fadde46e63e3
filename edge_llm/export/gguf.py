"""A reader of GGUF files that trusts nothing in them: metadata as Python values, tensors as views of a memory map.

Format: GGUF versions 2 and 3, little endian (the GGUF specification in ggml's docs; type sizes from ggml's headers).
A file is hostile until it has passed: every count and length is compared with the bytes that are left before anything
is read or allocated, and every tensor must lie inside the file and off every other tensor. The first broken rule ends
the reading with one `ModelFormatError`, which names the key or tensor and where it stands.

Strings must be UTF-8, as the specification says. A stand-in for broken bytes would reach the tokenizer and change what
text means, so a broken string is an error and not a guess.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_llm.errors import ModelFormatError, ModelNotFoundError, StorageError, UnsupportedModelError, quoted
from edge_llm.export.gguf_types import TENSOR_TYPES, TYPES_HINT, TensorType

GgufValue: TypeAlias = bool | int | float | str | list[str] | NDArray[Any]
"""A metadata value: NumPy arrays for arrays of numbers and booleans, lists for arrays of strings"""

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 64
MAX_STRING_BYTES = 16 << 20
MAX_ELEMENTS = 1 << 22
"""elements of all arrays of a file together; Gemma 3, with 262,144 tokens, has 1.6 million"""
MAX_METADATA_BYTES = 128 << 20
MIN_ALIGNMENT, DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 8, 32, 1 << 16

_MAGIC = b"GGUF"
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_TRUNCATED = "download or copy the file again"
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in NumPy order (rows first); `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class GgufFile:
    """An open GGUF file; a context manager. `read_gguf` makes it.

    `metadata` and `tensors` keep the order of the file and stay valid after closing. Views given by `tensor_bytes` keep
    the memory map alive by themselves.
    """

    def __init__(
        self,
        name: str,
        size: int,
        data: mmap.mmap,
        metadata: Mapping[str, GgufValue],
        tensors: Mapping[str, GgufTensor],
    ) -> None:
        self.name = name
        self.size = size
        self.metadata = MappingProxyType(dict(metadata))
        self.tensors = MappingProxyType(dict(tensors))
        self._data: mmap.mmap | None = data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back; the map itself goes with its last view."""
        data, self._data = self._data, None
        if data is not None:
            with suppress(BufferError):  # views live on: the last one closes the map
                data.close()

    @property
    def architecture(self) -> str:
        """The value of general.architecture, such as "llama"."""
        return self.text("general.architecture")

    def tensor(self, name: str) -> GgufTensor:
        """The tensor of that name. Raises `ModelFormatError` if there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFormatError(f"the file has no tensor {quoted(name)}") from None

    def tensor_bytes(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The raw bytes of `tensor`, uint8 [nbytes]: a read-only view of the file."""
        if self._data is None:
            raise ValueError("the GGUF file is closed")
        return np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """The whole number under `key`, in [low, high]. Raises `ModelFormatError` if it is not, or missing."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ModelFormatError(f"{quoted(key)} must be a whole number from {low} to {high}, not {_brief(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number under `key`. Raises `ModelFormatError` if it is not, or missing."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ModelFormatError(f"{quoted(key)} must be a finite number, not {_brief(value)}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """The boolean under `key`. Raises `ModelFormatError` if it is not, or missing."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelFormatError(f"{quoted(key)} must be true or false, not {_brief(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """The string under `key`. Raises `ModelFormatError` if it is not, or missing."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise ModelFormatError(f"{quoted(key)} must be a text, not {_brief(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """The array of strings under `key`. Raises `ModelFormatError` if it is not, or missing."""
        value = self._value(key, None)
        if not isinstance(value, list):
            raise ModelFormatError(f"{quoted(key)} must be an array of texts, not {_brief(value)}")
        return value

    def integers(self, key: str) -> NDArray[Any]:
        """The array of whole numbers under `key`. Raises `ModelFormatError` if it is not, or missing."""
        value = self._value(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise ModelFormatError(f"{quoted(key)} must be an array of whole numbers, not {_brief(value)}")
        return value

    def reals(self, key: str) -> NDArray[Any]:
        """The array of floating point numbers under `key`. Raises `ModelFormatError` if it is not, or missing."""
        value = self._value(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            raise ModelFormatError(f"{quoted(key)} must be an array of numbers, not {_brief(value)}")
        return value

    def _value(self, key: str, default: GgufValue | None) -> GgufValue:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFormatError(f"the file has no {quoted(key)}")
        return value


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open and check the GGUF file at `path`; tensor data is mapped, not read, so the file must not shrink meanwhile.

    Raises `ModelNotFoundError` for a missing file, `StorageError` for an unreadable one, `ModelFormatError` for what is
    no sound GGUF file, and its subclass `UnsupportedModelError` for a kind that is not read here: big endian, versions
    other than 2 and 3, tensor types of unknown size.
    """
    name = quoted(Path(path).name)
    # Opening a named pipe would wait for a writer; a device is not a model either.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise ModelNotFoundError(f"there is no file {name}") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot open {name}: {getattr(error, 'strerror', None) or 'not a file name'}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFormatError(f"{name} is not a regular file")
        if status.st_size < len(_MAGIC):
            raise ModelFormatError(f"{name} is not a GGUF file: it has {status.st_size} bytes")
        data = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StorageError(f"cannot read {name}: {error.strerror}") from None
    finally:
        os.close(descriptor)
    try:
        metadata, tensors = _parse(data, name)
    except BaseException:
        with suppress(BufferError):
            data.close()
        raise
    return GgufFile(Path(path).name, status.st_size, data, metadata, tensors)


def _brief(value: GgufValue) -> str:
    if isinstance(value, str):
        return quoted(value)
    return f"{len(value)} values" if isinstance(value, list | np.ndarray) else str(value)


class _Cursor:
    """Reads the front part of the file; never passes its end, nor `MAX_METADATA_BYTES`."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self.data = data
        self.file = file
        self.at = 0
        self.end = min(len(data), MAX_METADATA_BYTES)
        self.elements = 0

    def fail(self, what: str, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self.file}: {what} at byte {self.at} {problem}")

    def need(self, count: int, what: str) -> int:
        """Step over `count` bytes, which must be there; gives where they start."""
        start = self.at
        if count > self.end - start:
            if self.end < len(self.data):
                raise self.fail(what, f"makes the metadata longer than {MAX_METADATA_BYTES} bytes")
            left = self.end - start
            raise ModelFormatError(
                f"{self.file} is truncated: {what} at byte {start} needs {count} bytes, {left} are left",
                hint=_TRUNCATED,
            )
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.need(8, what))[0])

    def count(self, what: str, limit: int) -> int:
        value = self.u64(what)
        if value > limit:
            raise self.fail(what, f"is {value}, more than the {limit} allowed")
        return value

    def text(self, what: str, limit: int) -> str:
        length = self.count(f"the length of {what}", limit)
        start = self.need(length, what)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(what, "is not UTF-8") from None

    def name(self, kind: str, index: int, limit: int, taken: Mapping[str, Any]) -> str:
        """The name of the next key or tensor, which must be new."""
        name = self.text(f"the name of {kind} {index}", limit)
        if not name or name in taken:
            raise self.fail(f"{kind} {index}", f"has the name {quoted(name)}, which is {'taken' if name else 'empty'}")
        return name

    def value(self, key: str) -> GgufValue:
        what = f"the value of {quoted(key)}"
        number = self.u32(what)
        if number == _STRING:
            return self.text(what, MAX_STRING_BYTES)
        if number == _ARRAY:
            return self.array(what)
        if number not in _NUMBERS:
            raise self.fail(what, f"has the unknown type {number}")
        value: GgufValue = self.numbers(number, 1, what)[0].item()
        return value

    def array(self, what: str) -> GgufValue:
        number = self.u32(what)
        count = self.u64(what)
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self.fail(what, f"has {count} elements; all arrays together may have {MAX_ELEMENTS}")
        if number == _STRING:
            return self.texts(count, what)
        if number not in _NUMBERS:
            problem = "is an array of arrays" if number == _ARRAY else f"has elements of the unknown type {number}"
            raise self.fail(what, problem)
        return self.numbers(number, count, what)

    def numbers(self, number: int, count: int, what: str) -> NDArray[Any]:
        dtype = _NUMBERS[number]
        start = self.need(count * dtype.itemsize, what)
        array = np.frombuffer(self.data[start : self.at], dtype)
        if number == _BOOL:
            if array.max(initial=0) > 1:
                raise self.fail(what, "is a boolean other than 0 and 1")
            return array.astype(np.bool_)
        return array

    def texts(self, count: int, what: str) -> list[str]:
        if count * 8 > self.end - self.at:
            self.need(count * 8, what)
        # `text` inlined: vocabularies hold hundreds of thousands of strings.
        data, at, end, unpack = self.data, self.at, self.end, _U64.unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                if start > end:
                    break
                length = unpack(data, at)[0]
                if length > MAX_STRING_BYTES or length > end - start:
                    break
                at = start + length
                texts.append(data[start:at].decode("utf-8"))
        except UnicodeDecodeError:
            self.at = start
            raise self.fail(f"element {len(texts)} of {what}", "is not UTF-8") from None
        self.at = at
        if len(texts) < count:
            self.text(f"element {len(texts)} of {what}", MAX_STRING_BYTES)
        return texts


def _parse(data: mmap.mmap, file: str) -> tuple[dict[str, GgufValue], dict[str, GgufTensor]]:
    cursor = _Cursor(data, file)
    if data[: len(_MAGIC)] != _MAGIC:
        raise ModelFormatError(
            f"{file} is not a GGUF file: it starts with {data[: len(_MAGIC)]!r}", hint="give a file that ends in .gguf"
        )
    cursor.need(len(_MAGIC), "the header")
    version = cursor.u32("the version")
    if version not in (2, 3):
        big_endian = int.from_bytes(_U32.pack(version), "big") in (1, 2, 3)
        raise UnsupportedModelError(
            f"{file} is {'a big-endian GGUF file' if big_endian else f'of GGUF version {version}'}",
            hint="versions 2 and 3, little endian, are read: convert the model again with a current converter",
        )
    tensor_count = cursor.count("the number of tensors", MAX_TENSORS)
    key_count = cursor.count("the number of keys", MAX_KEYS)
    metadata: dict[str, GgufValue] = {}
    for index in range(key_count):
        key = cursor.name("key", index, MAX_KEY_BYTES, metadata)
        metadata[key] = cursor.value(key)
    return metadata, _tensors(cursor, tensor_count, _alignment(metadata, file))


def _alignment(metadata: Mapping[str, GgufValue], file: str) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, int) and MIN_ALIGNMENT <= value <= MAX_ALIGNMENT and value.bit_count() == 1:
        return value
    wanted = f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
    raise ModelFormatError(f"{file}: 'general.alignment' must be {wanted}, not {_brief(value)}")


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    entries: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
    for index in range(count):
        name = cursor.name("tensor", index, MAX_TENSOR_NAME_BYTES, entries)
        entries[name] = _tensor_entry(cursor, f"tensor {quoted(name)}", alignment)
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(name, shape, kind.name, start + offset, math.prod(shape) // kind.block * kind.nbytes)
        for name, (shape, kind, offset) in entries.items()
    }
    _check_places(tensors, len(cursor.data), cursor.file)
    return tensors


def _tensor_entry(cursor: _Cursor, what: str, alignment: int) -> tuple[tuple[int, ...], TensorType, int]:
    """Shape in NumPy order, type, and offset within the data part."""
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(what, f"has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))[::-1]
    number = cursor.u32(what)
    offset = cursor.u64(what)
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise UnsupportedModelError(
            f"{cursor.file}: {what} has type {number}, which is not known here", hint=TYPES_HINT
        )
    if 0 in shape:
        raise cursor.fail(what, f"has the empty shape {list(shape)}")
    if shape[-1] % kind.block:
        raise cursor.fail(
            what, f"has rows of {shape[-1]} values, which do not fill blocks of {kind.block} ({kind.name})"
        )
    if offset % alignment:
        raise cursor.fail(what, f"has the offset {offset}, not a multiple of the alignment {alignment}")
    return shape, kind, offset


def _check_places(tensors: Mapping[str, GgufTensor], size: int, file: str) -> None:
    """Every tensor inside the file, no byte in two tensors."""
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        name = quoted(tensor.name)
        if tensor.offset < end:
            raise ModelFormatError(f"{file}: tensors {before} and {name} overlap at byte {tensor.offset}")
        end, before = tensor.offset + tensor.nbytes, name
        if end > size:
            raise ModelFormatError(
                f"{file} is truncated: tensor {name} ends at byte {end}, the file has {size} bytes",
                hint=_TRUNCATED,
            )
