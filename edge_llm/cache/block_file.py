"""BlockFormat: one block as the bytes of a safetensors file, and back.

    8 bytes   length of the header
    header    JSON, the same for every block of a model: a reader knows each of its bytes before it reads
    tokens    int32 [64], -1 after the last
    parent    uint8 [32], key of the blocks before
    rows      the arrays of a Snapshot of one tile
    digest    uint8 [32], BLAKE2b-256 of everything before it

So no byte of a file is believed: those of the header are compared, those of tokens and parent too, and the digest covers
all of them and the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge_llm.cache.blocks import BLOCK, KEY_BYTES, Block, child_key

FORMAT = "edge-llm prefix block 1"
_TOKENS, _PARENT, _DIGEST = "block.tokens", "block.parent", "block.digest"
_TYPES = {"int32": "I32", "uint8": "U8", "int8": "I8", "float32": "F32"}
_IDS_BYTES = 4 * BLOCK

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]


class BlockFormat:
    """How blocks of one model, kept under one `fingerprint`, are written."""

    def __init__(self, fingerprint: str, shapes: Shapes) -> None:
        """`shapes` are those of the arrays of a block's snapshot (KVCache.snapshot_shapes)."""
        self.fingerprint = fingerprint
        self._shapes = dict(shapes)
        entries, end = {}, 0
        tensors: Shapes = {
            _TOKENS: ((BLOCK,), np.dtype(np.int32)),
            _PARENT: ((KEY_BYTES,), np.dtype(np.uint8)),
            **self._shapes,
            _DIGEST: ((KEY_BYTES,), np.dtype(np.uint8)),
        }
        for name, (shape, kind) in tensors.items():
            size = int(np.prod(shape)) * kind.itemsize
            entries[name] = {"dtype": _TYPES[kind.name], "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        metadata = {"format": FORMAT, "fingerprint": fingerprint}
        text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode("ascii")
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.size = len(self._header) + end
        """bytes of every file"""

    def encode(self, block: Block) -> bytearray:
        """The bytes of a block's file."""
        ids = np.full(BLOCK, -1, "<i4")
        ids[: len(block.ids)] = block.ids
        data = bytearray(self.size)
        done = 0
        rows = (np.ascontiguousarray(block.arrays[name]).tobytes() for name in self._shapes)
        for part in (self._header, ids.tobytes(), block.parent, *rows):
            data[done : done + len(part)] = part
            done += len(part)
        data[done:] = _digest(memoryview(data)[:done])
        return data

    def decode(self, data: bytes | bytearray, parent: bytes) -> Block | None:
        """The block after `parent` that `data` holds, sharing its memory; None for anything else."""
        if len(data) != self.size or not data.startswith(self._header):
            return None
        ids = _sound_ids(data, len(self._header))
        if ids is None or _parent(data, len(self._header)) != parent:
            return None
        arrays, start = {}, len(self._header) + _IDS_BYTES + KEY_BYTES
        for name, (shape, kind) in self._shapes.items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(data, kind, count, start).reshape(shape)
            start += count * kind.itemsize
        return Block(parent, ids, arrays)


@dataclass(frozen=True, slots=True)
class BlockName:
    """What a file's name says: the key of a whole block, or the parent of one that is not."""

    key: bytes
    whole: bool

    def __str__(self) -> str:
        return f"{self.key.hex()}{'' if self.whole else '-rest'}.safetensors"

    @classmethod
    def of(cls, block: Block) -> BlockName:
        return cls(child_key(block.parent, block.ids), True) if block.whole else cls(block.parent, False)


def is_sound(data: bytes, name: str) -> bool:
    """Whether `data` is a block of any model, as it was written, in a file of the right name."""
    start = 8 + int.from_bytes(data[:8], "little")
    if start + _IDS_BYTES + 2 * KEY_BYTES > len(data):
        return False
    ids = _sound_ids(data, start)
    return ids is not None and str(BlockName.of(Block(_parent(data, start), ids, {}))) == name


def _sound_ids(data: bytes | bytearray, start: int) -> tuple[int, ...] | None:
    """The tokens of a block whose header ends at `start`, if the digest at its end is right."""
    view = memoryview(data)
    if _digest(view[:-KEY_BYTES]) != bytes(view[-KEY_BYTES:]):
        return None
    ids: list[int] = np.frombuffer(data, "<i4", BLOCK, start).tolist()
    count = sum(i >= 0 for i in ids)
    return tuple(ids[:count]) if count and all(i >= 0 for i in ids[:count]) else None


def _parent(data: bytes | bytearray, start: int) -> bytes:
    return bytes(data[start + _IDS_BYTES : start + _IDS_BYTES + KEY_BYTES])


def _digest(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
