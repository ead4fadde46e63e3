"""The bytes of a block: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

import json

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


def test_too_much_or_too_little_is_not_sound() -> None:
    one = block()
    data, name = bytes(FORM.encode(one)), str(BlockName.of(one))
    for length in (0, 7, 8, 100, 1000, len(data) - 1):
        assert not is_sound(data[:length], name)
    assert not is_sound(data + b"\0", name)
    assert FORM.decode(data + b"\0", ROOT) is None


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
