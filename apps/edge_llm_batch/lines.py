"""Lines of a batch's input, numbered and identified, one at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Self

from edge_llm.errors import InputError, ParameterError

MAX_LINE_BYTES = 8 << 20
"""as much as the server takes for a body"""
_BOM = b"\xef\xbb\xbf"
_ID = re.compile(r"batch_req_([0-9a-f]{10})([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class LineId:
    """Which line of which input an answer belongs to: its number, from 1, and a digest of its bytes and of the job."""

    number: int
    digest: int

    def __str__(self) -> str:
        return f"batch_req_{self.number:010x}{self.digest:016x}"

    @classmethod
    def parse(cls, text: object) -> Self | None:
        """The id that `str` gave, or None for anything else."""
        found = _ID.fullmatch(text) if isinstance(text, str) else None
        return None if found is None else cls(int(found[1], 16), int(found[2], 16))


@dataclass(frozen=True, slots=True)
class Line:
    """`data` is without the line's end; None for a line that is longer than `MAX_LINE_BYTES`.

    `offset` counts bytes from where reading began.
    """

    id: LineId
    data: bytes | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of an input: every line whose number leaves the same rest."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """`2/4` is the second of four. Raises `ParameterError`."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ParameterError(f"shard must be I/N with I from 1 to N, as 1/4, not {text!a}")
        return cls(int(found[1]), int(found[2]))

    def has(self, line: LineId) -> bool:
        return line.number % self.count == self.index % self.count


def read_lines(stream: BinaryIO, job: bytes, first: int = 1) -> Iterator[Line]:
    """All lines that are not blank; the next one has the number `first`.

    `job` (at most 64 bytes) says what else answers depend on: it goes into the ids.
    """
    number, end = first - 1, 0
    while data := stream.readline(MAX_LINE_BYTES + 2):
        number += 1
        offset, end = end, end + len(data)
        digest = hashlib.blake2b(number.to_bytes(8, "big"), digest_size=8, key=job)
        whole = len(data.rstrip(b"\r\n")) <= MAX_LINE_BYTES
        while not whole and not data.endswith(b"\n") and (more := stream.readline(1 << 20)):
            digest.update(data)
            data = more
            end += len(data)
        data = data.removeprefix(_BOM if number == 1 else b"").strip(b" \t\r\n")
        digest.update(data)
        if data or not whole:
            yield Line(LineId(number, int.from_bytes(digest.digest(), "big")), data if whole else None, offset)


@dataclass(frozen=True, slots=True)
class Survey:
    """How many lines a shard has, and how many of them are done."""

    lines: int
    done: int

    @classmethod
    def of(cls, lines: Iterable[Line], shard: Shard, done: Mapping[int, LineId]) -> Self:
        """Raises `InputError` unless all that is `done` was done for these lines."""
        count = own = known = 0
        for line in lines:
            is_done = check_done(line.id, done)
            known += is_done
            if shard.has(line.id):
                count += 1
                own += is_done
        if known != len(done):
            raise _other_input()
        return cls(count, own)


def check_done(line: LineId, done: Mapping[int, LineId]) -> bool:
    """Whether this line is done. Raises `InputError` if another one of its number is."""
    before = done.get(line.number)
    if before not in (None, line):
        raise _other_input()
    return before is not None


def _other_input() -> InputError:
    return InputError(
        "the output file holds answers to another input, or of another model or other options",
        hint="go on with what it was begun with, or give another output file",
    )
