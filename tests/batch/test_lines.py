"""Lines: each is known again by its number and bytes, and belongs to exactly one shard."""

from __future__ import annotations

import io

import pytest
from edge_llm_batch import lines
from edge_llm_batch.lines import LineId, Shard, Survey, check_done, read_lines
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.errors import InputError, ParameterError


def read(data: bytes, job: bytes = b"job") -> list[lines.Line]:
    return list(read_lines(io.BytesIO(data), job))


def test_blank_lines_count_but_are_no_requests() -> None:
    found = read(b"\xef\xbb\xbfa\r\n\n  \t\nb\n c ")
    assert [(line.id.number, line.data) for line in found] == [(1, b"a"), (4, b"b"), (5, b"c")]


def test_an_id_follows_from_number_bytes_and_job() -> None:
    one, other = read(b"a\na\n")
    assert one.id.digest != other.id.digest
    assert read(b"a\nb\n")[0].id == one.id
    assert read(b"a  \r\n")[0].id == one.id  # white space around a line says nothing
    assert read(b"a")[0].id == one.id
    assert read(b"A\n")[0].id != one.id
    assert read(b"a\n", b"other")[0].id != one.id


def test_a_line_that_is_too_long_is_one_line_and_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 8)
    data = b"x" * 3_000_000
    for end in (b"", b"\n", b"\n12345678\n", b"\r\n"):
        found = read(data + end)
        assert [line.data for line in found] == ([None, b"12345678"] if b"1" in end else [None])
    assert read(data)[0].id == read(data + b"\n")[0].id
    assert read(data)[0].id != read(data + b"y")[0].id
    assert [line.data for line in read(b"12345678\n123456789\n")] == [b"12345678", None]


@given(st.integers(1, 16**10 - 1), st.integers(0, 16**16 - 1))
def test_an_id_is_read_back(number: int, digest: int) -> None:
    line = LineId(number, digest)
    assert LineId.parse(str(line)) == line


@pytest.mark.parametrize("text", [None, 5, "", "batch_req_1", "batch_req_" + "g" * 26, "batch_req_" + "0" * 27])
def test_other_ids_are_none_of_ours(text: object) -> None:
    assert LineId.parse(text) is None


def test_shards_part_the_lines() -> None:
    shards = [Shard.parse(f"{i}/3") for i in (1, 2, 3)]
    for number in range(1, 20):
        assert sum(shard.has(LineId(number, 0)) for shard in shards) == 1
    assert [shard.has(LineId(1, 0)) for shard in shards] == [True, False, False]
    assert all(Shard().has(LineId(number, 0)) for number in range(1, 9))


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", "1/9999999"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ParameterError, match="I/N"):
        Shard.parse(text)


def test_a_survey_counts_and_refuses_what_was_done_for_others() -> None:
    found = read(b"a\nb\n\nc\n")
    first, _, third = (line.id for line in found)
    assert Survey.of(found, Shard(), {}) == Survey(3, 0)
    assert Survey.of(found, Shard(2, 2), {1: first, 4: third}) == Survey(2, 1)
    for done in ({1: LineId(1, 5)}, {9: LineId(9, 5)}, {3: LineId(3, 5)}):
        with pytest.raises(InputError, match="another input"):
            Survey.of(found, Shard(), done)
    assert (check_done(first, {1: first}), check_done(first, {})) == (True, False)
