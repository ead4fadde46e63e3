"""Blocks with recognisable rows, and a store over a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.cache.block_file import BlockFormat
from edge_llm.cache.blocks import BLOCK, Block, root_key
from edge_llm.cache.prefix_store import PrefixStore

SHAPES = {
    "global.keys": ((2, 1, 1, 2, 64, 4), np.dtype(np.uint8)),
    "global.values": ((2, 1, 1, 16, 8, 4), np.dtype(np.int8)),
    "global.key_scales": ((2, 1, 1, 64), np.dtype(np.float32)),
}
FORM = BlockFormat("f" * 64, SHAPES)
ROOT = root_key(FORM.fingerprint, "")
BUDGET = 1 << 20


def block(seed: int = 1, *, parent: bytes = ROOT, tokens: int = BLOCK) -> Block:
    generator = np.random.default_rng(seed)
    arrays = {name: generator.integers(0, 100, shape).astype(kind) for name, (shape, kind) in SHAPES.items()}
    return Block(parent, tuple(generator.integers(0, 1000, tokens).tolist()), arrays)


def same(one: Block | None, other: Block) -> bool:
    return (
        one is not None
        and (one.parent, one.ids) == (other.parent, other.ids)
        and all(np.array_equal(one.arrays[name], other.arrays[name]) for name in SHAPES)
        and all(one.arrays[name].dtype == kind for name, (_, kind) in SHAPES.items())
    )


def open_store(folder: Path, **options: Any) -> PrefixStore:
    return PrefixStore(folder, options.pop("form", FORM), **{"budget": BUDGET, **options})


def stored(folder: Path, *blocks: Block, **options: Any) -> PrefixStore:
    """A store that has written the blocks, one after the other, and is closed: it still reads."""
    store = open_store(folder, **options)
    for one in blocks:
        store.write(one)
        store.close()
    return store


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".tmp")]
