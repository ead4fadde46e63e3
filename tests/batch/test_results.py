"""Results: a file remembers what is done, loses nothing, and harms no file that is something else."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from edge_llm_batch import results
from edge_llm_batch.lines import LineId
from edge_llm_batch.results import ResultFile, ResultStream, open_results

from edge_llm.errors import InputError, StorageError


def result(number: int, status: int | None = 200) -> dict[str, Any]:
    response = None if status is None else {"status_code": status, "request_id": "r", "body": {"text": "é" * 9}}
    error = {"code": "x", "message": "y", "line": number} if status is None else None
    return {"id": str(LineId(number, 7)), "custom_id": f"c{number}", "response": response, "error": error}


def written(path: Path, *lines: dict[str, Any]) -> bytes:
    file = ResultFile(path)
    for line in lines:
        file.write(line)
    file.close()
    return path.read_bytes()


def opened(path: Path) -> ResultFile:
    file = ResultFile(path)
    file.close()
    return file


def test_what_is_done_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, result(3), result(1, 429))
    before = path.read_bytes()
    file = ResultFile(path)
    assert file.done == {3: LineId(3, 7), 1: LineId(1, 7)}
    assert file.errors == 1
    file.write(result(2, None))
    file.close()
    assert path.read_bytes().startswith(before)
    assert opened(path).errors == 2
    assert [json.loads(line)["custom_id"] for line in path.read_text("ascii").splitlines()] == ["c3", "c1", "c2"]


def test_a_last_line_cut_anywhere_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = written(path, result(1))
    both = written(path, result(2))
    for length in range(len(first), len(both)):
        path.write_bytes(both[:length])
        whole = length == len(both) - 1  # all but its line end
        assert sorted(opened(path).done) == ([1, 2] if whole else [1])
        assert path.read_bytes() == (both if whole else first)
        assert written(path, *([] if whole else [result(2)])) == both


def test_zeros_after_a_power_cut_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, result(1))
    path.write_bytes(whole + b"\0" * 100)
    assert sorted(opened(path).done) == [1]
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        b"dear diary",
        b"dear diary\n",
        b"{}\n",
        b"[]\n",
        b"5",
        b'{"id": "batch_req_1", "response": null}\n',
        b'{"id": "batch_req_' + b"0" * 26 + b'"}\n',
        b'{"id": "batch_req_' + b"0" * 26 + b'", "response": {}}\n',
        b'{"id": "batch_req_' + b"0" * 26 + b'", "response": 5}\n',
        b'{"id": "batch_req_00\nmore\n',
        b"[" * 100_000 + b"\n",
        b"\xff\n",
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "diary.txt"
    for before in (b"", written(tmp_path / "ours", result(1))):
        path.write_bytes(before + content)
        with pytest.raises(InputError, match=rf"line {2 if before else 1} of .*diary.txt is no answer"):
            ResultFile(path)
        assert path.read_bytes() == before + content


def test_one_line_answered_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, result(1), result(1))
    with pytest.raises(InputError, match="line 1 twice"):
        ResultFile(path)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = ResultFile(path)
    code = f"from pathlib import Path\nfrom edge_llm_batch.results import ResultFile\nResultFile(Path({str(path)!r}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["apps", "."])}
    root = Path(__file__).parents[2]
    other = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert "another process writes" in other.stderr
    file.close()
    opened(path)


def test_a_full_disk_is_an_error_and_the_file_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, result(1))
    file = ResultFile(path)

    class Full:
        def __init__(self, raw: Any) -> None:
            self.raw, self.calls = raw, 0

        def write(self, data: memoryview) -> int:
            self.calls += 1
            if self.calls > 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.raw.write(data[:5])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.raw, name)

    raw = file._file
    monkeypatch.setattr(file, "_file", Full(raw))
    with pytest.raises(StorageError, match=r"out.jsonl: No space left"):
        file.write(result(2))
    raw.close()
    assert path.read_bytes() != whole
    assert sorted(opened(path).done) == [1]
    assert path.read_bytes() == whole


def test_writes_reach_the_disk_every_few_seconds_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(results.os, "fsync", synced.append)
    now = 0.0
    monkeypatch.setattr(results.time, "monotonic", lambda: now)
    file = ResultFile(tmp_path / "out.jsonl")
    file.write(result(1))
    assert not synced
    now = results.SYNC_SECONDS
    file.write(result(2))
    file.write(result(3))
    assert len(synced) == 1
    file.close()
    assert len(synced) == 2


def test_a_folder_that_is_missing_or_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        open_results(tmp_path / "none" / "out.jsonl")
    with pytest.raises(StorageError, match="Is a directory"):
        open_results(tmp_path)


def test_a_stream_remembers_nothing(tmp_path: Path) -> None:
    stream = io.BytesIO()
    out = ResultStream(stream)
    out.write(result(1))
    out.close()
    assert json.loads(stream.getvalue()) == result(1)
    assert out.done == {}
    device = open_results(Path(os.devnull))
    device.write(result(1))
    device.close()
    assert isinstance(device, ResultStream)
