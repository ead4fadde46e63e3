"""Arrays that touch memory nobody may read: an access one byte outside them ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

POISON = 0xFF
"""fills the page around an array; as a float it is NaN"""

_PAGE = mmap.PAGESIZE


def guarded(shape: Sequence[int], kind: type[np.generic], *, at_end: bool = True) -> np.ndarray:
    """A poisoned array that ends (or begins) exactly where an unreadable page begins (or ends)."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    room = max(_PAGE, -(-size // _PAGE) * _PAGE)
    memory = mmap.mmap(-1, room + 2 * _PAGE)
    whole = np.frombuffer(memory, np.uint8)
    whole[:] = POISON
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (0, _PAGE + room):
        assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + page), ctypes.c_size_t(_PAGE), 0) == 0
    inside = whole[_PAGE : _PAGE + room]
    return (inside[room - size :] if at_end else inside[:size]).view(kind).reshape(shape)


def guarded_copy(values: np.ndarray, *, at_end: bool = True) -> np.ndarray:
    """`values` in guarded memory."""
    copy = guarded(values.shape, values.dtype.type, at_end=at_end)
    copy[...] = values
    return copy


def untouched(array: np.ndarray) -> bool:
    """Whether the rest of the readable pages around a guarded array still holds poison."""
    start = array.ctypes.data
    end = start + array.nbytes
    first, last = start // _PAGE * _PAGE, max(-(-end // _PAGE) * _PAGE, start // _PAGE * _PAGE + _PAGE)
    around = [(first, start - first), (end, last - end)]
    return all(ctypes.string_at(at, size).count(POISON) == size for at, size in around)
