"""parse_body: JSON from strangers."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from edge_llm_server.api_error import ApiError
from edge_llm_server.body import MAX_DEPTH, MAX_OBJECTS, parse_body
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not sound JSON"),
        (b"{", "not sound JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": Infinity}', "Infinity is no JSON"),
        (b'{"a": -Infinity}', "-Infinity is no JSON"),
        (b'{"a": 1e999}', "too long or too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", "more than 32 digits"),
        (b'{"a": 0.' + b"1" * 5000 + b"}", "too long or too large"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a": {"b": 1, "\\u0062": 2}}', "'b' stands twice"),
        (b'{"a": "\\ud800"}', "half a surrogate pair"),
        (b'{"\\udfff": 1}', "half a surrogate pair"),
        (b'{"a": "\x00"}', "not sound JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 64 levels"),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, "more than 64 levels"),
        (b"[" * 10_000_000, "more than 64 levels"),
        (b'{"a": [' + b"{}," * MAX_OBJECTS + b"1]}", "more than 32768 objects"),
    ],
)
def test_what_is_wrong_is_a_400(data: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse_body(data)
    assert caught.value.status == 400


def test_what_is_wrong_is_not_repeated() -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(b'{"secret words": oops}')
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("data", [b'"\\' * 2_000_000, b'{"a": "' + b'\\"' * 2_000_000, b'"[' * 2_000_000])
def test_time_grows_with_the_size_and_not_faster(data: bytes) -> None:
    """Four million bytes for which its square would take hours."""
    with pytest.raises(ApiError):
        parse_body(data)


def nested(levels: int) -> bytes:
    return b'{"a": ' * levels + b"1" + b"}" * levels


def test_the_deepest_that_is_taken() -> None:
    assert parse_body(nested(MAX_DEPTH))
    with pytest.raises(ApiError):
        parse_body(nested(MAX_DEPTH + 1))
    brackets = {"a": "[" * 1000 + '\\"{' * 1000}
    assert parse_body(json.dumps(brackets).encode()) == brackets


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_sound_json_is_what_it_says(value: dict[str, Any], ascii_only: bool) -> None:
    assert parse_body(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_400(data: bytes) -> None:
    with contextlib.suppress(ApiError):
        assert isinstance(parse_body(data), dict)
