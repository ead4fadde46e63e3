"""Blocks: names for the beginnings of conversations, as chained hashes over their tokens.

A conversation's tokens fall into blocks of 64. The key of a block stands for all tokens up to its end, and for whatever
else the rows depend on:

    key(-1) = BLAKE2b-256(fingerprint, namespace)
    key(i)  = BLAKE2b-256(key(i - 1), the tokens of block i as little-endian int32)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge_llm.kernels.layout import TILE

BLOCK = TILE
"""tokens of a whole block"""
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of 1 to BLOCK tokens that follow those of `parent`; `arrays` as those of a Snapshot of one tile."""

    parent: bytes
    ids: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]

    @property
    def whole(self) -> bool:
        return len(self.ids) == BLOCK


class BlockStore(Protocol):
    """Keeps blocks longer than a process lives. Nothing here raises: what cannot be kept or read is not there.

    Whole blocks are found by their tokens, what is left at the end of a conversation by its parent alone.
    """

    fingerprint: str
    """what rows depend on besides tokens"""

    @property
    def has_room(self) -> bool:
        """Whether `write` would take a block now."""
        ...

    def write(self, block: Block) -> None:
        """Keep a block, soon."""
        ...

    def read(self, parent: bytes, ids: Sequence[int]) -> Block | None:
        """The whole block of these tokens."""
        ...

    def read_rest(self, parent: bytes) -> Block | None:
        """The last block, not whole, of a conversation that ended after `parent`."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """A conversation, whose keys these are in order, was used."""
        ...

    def close(self) -> None:
        """Finish what was to be kept."""
        ...


def root_key(fingerprint: str, namespace: str) -> bytes:
    """Key of the empty beginning."""
    texts = [text.encode("utf-8", "surrogatepass") for text in (fingerprint, namespace)]
    return _digest(*(len(text).to_bytes(8, "little") + text for text in texts))


def child_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """Key of the block with these tokens after `parent`."""
    return _digest(parent, np.array(ids, "<i4").tobytes())


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()
