"""Loads the kernels' relocatable object code without LLVM: a start needs neither its 47 MB of library nor its time.

Numba compiles for the large code model, so on x86-64 two relocations are all there are: an address, and a distance. What
is not known here (another file format, CPU or relocation) is refused by a `ValueError`, and LLVM loads it instead.

Facts of the format: System V ABI, and its AMD64 supplement (relocation types).
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_RELOCATABLE, _X86_64 = 1, 62
_R_64, _R_PC64 = 1, 24
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")
_SYMBOLS, _RELOCATIONS, _NOTHING = 2, 4, 8  # section types
_ALLOCATED = 2  # section flag
_UNDEFINED, _COMMON = 0, 0xFFF2  # section numbers of symbols
_MAX_IMAGE = 64 << 20

Resolve = Callable[[str], int]
"""gives the address of a symbol outside; raises `ValueError` for one that there is not"""


@dataclass(slots=True)
class _Section:
    name: str
    kind: int
    flags: int
    data: memoryview
    size: int
    info: int
    alignment: int
    place: int = -1
    """where it lies in the image; -1: nowhere"""


@dataclass(slots=True)
class _Symbol:
    name: str
    section: int
    value: int
    size: int
    local: bool
    place: int = -1


class LoadedCode:
    """Object files in memory that can be run and no longer be written; it must outlive every caller."""

    def __init__(self, objects: list[bytes], resolve: Resolve) -> None:
        """Raises `ValueError` or `OSError` if they cannot be loaded."""
        try:
            self._load([_ObjectFile(code) for code in objects], resolve)
        except (struct.error, IndexError, OverflowError, UnicodeDecodeError, StopIteration) as error:
            raise ValueError(f"damaged object code: {error}") from None

    def _load(self, files: list[_ObjectFile], resolve: Resolve) -> None:
        size = 0
        for file in files:
            size = file.lay_out(size)
        if size > _MAX_IMAGE:
            raise ValueError(f"{size} bytes of code")
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.symbols: dict[str, int] = {}
        """addresses of what the files define, by name"""
        for file in files:
            self.symbols |= {symbol.name: base + symbol.place for symbol in file.defined if not symbol.local}
        for file in files:
            file.write(self._memory, base, lambda name: self.symbols.get(name) or resolve(name))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(self._memory)), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "memory cannot be made executable")


class _ObjectFile:
    """One ELF64 relocatable file."""

    def __init__(self, code: bytes) -> None:
        if code[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", code, 16) != (_RELOCATABLE, _X86_64):
            raise ValueError("not a relocatable ELF file for x86-64")
        self._sections = _read_sections(code)
        self._symbols = self._read_symbols()

    @property
    def defined(self) -> list[_Symbol]:
        return [symbol for symbol in self._symbols if symbol.place >= 0 and symbol.name]

    def lay_out(self, start: int) -> int:
        """Give sections and symbols their places in the image from `start` on; gives the end."""
        for section in self._sections:
            # tables for unwinding are only read when a frame is: none of ours raises
            if section.flags & _ALLOCATED and section.size and section.name != ".eh_frame":
                section.place = _aligned(start, section.alignment)
                start = section.place + section.size
        for symbol in self._symbols:
            if symbol.section == _COMMON:
                symbol.place = _aligned(start, symbol.value)
                start = symbol.place + symbol.size
            elif symbol.section != _UNDEFINED and symbol.section < len(self._sections):
                section = self._sections[symbol.section]
                symbol.place = section.place + symbol.value if section.place >= 0 else -1
        return _aligned(start, mmap.PAGESIZE)

    def write(self, memory: Any, base: int, resolve: Resolve) -> None:
        """Copy the sections to their places and put addresses into them."""
        for section in self._sections:
            if section.place >= 0 and section.kind != _NOTHING:
                memory[section.place : section.place + section.size] = section.data
        addresses: dict[int, int] = {}
        for table in self._sections:
            if table.kind != _RELOCATIONS or self._sections[table.info].place < 0:
                continue
            target = self._sections[table.info]
            for offset, kind, index, addend in _RELOCATION.iter_unpack(table.data):
                if index not in addresses:
                    symbol = self._symbols[index]
                    addresses[index] = base + symbol.place if symbol.place >= 0 else resolve(symbol.name)
                place = target.place + offset
                if kind not in (_R_64, _R_PC64) or offset + 8 > target.size:
                    raise ValueError(f"relocation {kind} at {offset} of {target.name} is not supported")
                value = addresses[index] + addend - (base + place if kind == _R_PC64 else 0)
                struct.pack_into("<Q", memory, place, value & (1 << 64) - 1)

    def _read_symbols(self) -> list[_Symbol]:
        tables = [section for section in self._sections if section.kind == _SYMBOLS]
        if len(tables) != 1:
            raise ValueError(f"{len(tables)} symbol tables")
        names = next(section.data for section in self._sections if section.name == ".strtab")
        return [
            _Symbol(_text(names, name), section, value, size, local=info >> 4 == 0)
            for name, info, _, section, value, size in _SYMBOL.iter_unpack(tables[0].data)
        ]


def _read_sections(code: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", code, 40)
    count, names_at = struct.unpack_from("<HH", code, 60)
    view = memoryview(code)
    raw = [_SECTION.unpack_from(code, table + _SECTION.size * i) for i in range(count)]
    sections = []
    for name, kind, flags, _, offset, size, _, info, alignment, _ in raw:
        data = view[0:0] if kind == _NOTHING else view[offset : offset + size]
        if kind not in (0, _NOTHING) and len(data) != size:
            raise ValueError("a section reaches beyond the file")
        names = view[raw[names_at][4] :]
        sections.append(_Section(_text(names, name), kind, flags, data, size, info, alignment))
    return sections


def _text(names: memoryview, start: int) -> str:
    return bytes(names[start : start + 4096]).split(b"\0", 1)[0].decode()


def _aligned(value: int, alignment: int) -> int:
    return -(-value // max(alignment, 1)) * max(alignment, 1)
