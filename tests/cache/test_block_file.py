"""The bytes of a block: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from edge_llm.cache.block_file import FORMAT, BlockFormat, BlockName, is_sound
from edge_llm.cache.blocks import BLOCK, child_key, root_key
from tests.cache.blocks_rig import FORM, ROOT, SHAPES, block, same


@pytest.mark.parametrize("tokens", [1, 63, BLOCK])
def test_a_block_comes_back(tokens: int) -> None:
    one = block(tokens=tokens)
    data = FORM.encode(one)
    assert len(data) == FORM.size
    assert same(FORM.decode(data, ROOT), one)
    assert FORM.decode(data, bytes(32)) is None
    assert is_sound(bytes(data), str(BlockName.of(one)))
    assert not is_sound(bytes(data), str(BlockName(ROOT, tokens != BLOCK)))


def test_it_is_safetensors() -> None:
    """By the format's own description: the header's length, JSON, then tensors that cover the rest without a gap."""
    one = block()
    data = bytes(FORM.encode(one))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": FORMAT, "fingerprint": FORM.fingerprint}
    end = 0
    kinds = {"U8": np.uint8, "I8": np.int8, "I32": np.int32, "F32": np.float32}
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == end
        end = stop
        array = np.frombuffer(data[8 + size + start : 8 + size + stop], kinds[entry["dtype"]])
        found[name] = array.reshape(entry["shape"])
    assert 8 + size + end == len(data)
    assert tuple(found["block.tokens"]) == one.ids
    for name in SHAPES:
        assert np.array_equal(found[name], one.arrays[name])


def test_every_flipped_bit_of_the_header_and_any_other_is_a_miss() -> None:
    """F3, commit size: all bits of header, tokens, parent and digest, 2,000 of the rows."""
    data = FORM.encode(block())
    rows = 8 + int.from_bytes(data[:8], "little") + 4 * BLOCK + 32
    bits = [*range(8 * rows), *range(8 * (len(data) - 32), 8 * len(data))]
    bits += random.Random(1).sample(range(8 * rows, 8 * (len(data) - 32)), 2000)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        assert FORM.decode(data, ROOT) is None
        data[bit // 8] ^= 1 << bit % 8
    assert same(FORM.decode(data, ROOT), block())


def test_every_length_but_the_right_one_is_a_miss() -> None:
    """F3: truncations at every length, and too much."""
    one = block()
    data = bytes(FORM.encode(one))
    for length in range(len(data)):
        assert FORM.decode(data[:length], ROOT) is None
        assert length % 97 or not is_sound(data[:length], str(BlockName.of(one)))
    assert FORM.decode(data + b"\0", ROOT) is None
    assert not is_sound(data + b"\0", str(BlockName.of(one)))


@pytest.mark.parametrize(
    "other",
    [
        BlockFormat("e" * 64, SHAPES),
        BlockFormat("f" * 64, {**SHAPES, "global.key_scales": ((2, 1, 1, 64), np.dtype(np.int32))}),
        BlockFormat("f" * 64, {**SHAPES, "global.values": ((1, 2, 1, 16, 8, 4), np.dtype(np.int8))}),
        BlockFormat("f" * 64, {name.replace("global", "local"): shape for name, shape in SHAPES.items()}),
    ],
)
def test_a_block_of_another_model_is_none(other: BlockFormat) -> None:
    """B25: other weights, another type or another geometry."""
    assert other.decode(FORM.encode(block()), ROOT) is None


@pytest.mark.parametrize("tokens", [[], [-1] * 64, [1, -1, 2], [-5, 1]])
def test_tokens_that_nobody_wrote_are_refused_even_under_a_right_digest(tokens: list[int]) -> None:
    one = block()
    forged = FORM.encode(type(one)(ROOT, tuple(tokens), one.arrays))
    assert FORM.decode(forged, ROOT) is None


def test_keys_tell_all_that_matters_apart() -> None:
    roots = {root_key(*texts) for texts in (("a", "b"), ("ab", ""), ("", "ab"), ("b", "a"), ("a", "b\udc80"))}
    assert len(roots) == 5
    key = root_key("a", "b")
    keys = {child_key(key, ids) for ids in ([1], [1, 0], [0, 1], [256], [2], [])}
    keys.add(child_key(child_key(key, [1]), [0]))
    assert len(keys) == 7
