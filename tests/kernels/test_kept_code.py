"""The file of compiled kernels, shared by processes and written to disks that fill up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_llm.errors import StorageError
from edge_llm.kernels import warmup

WRITER = """
import sys
from pathlib import Path
from edge_llm.errors import StorageError
from edge_llm.kernels import warmup
for i in range(150):
    warmup._store(Path(sys.argv[1]), [sys.argv[2].encode() * 20_000], {"name": "symbol"})
"""


def test_readers_see_old_or_new_code_and_never_half(tmp_path: Path) -> None:
    """B27: two processes write what a third one reads."""
    folder = tmp_path / "kernels" / ("0" * 32)
    folder.mkdir(parents=True)
    warmup._store(folder, [b"first"], {"name": "symbol"})
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder), letter], env=environment) for letter in "ab"
    ]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        assert warmup._checked_body((folder / "kernels.bin").read_bytes()) is not None
        reads += 1
    assert [writer.wait() for writer in writers] == [0, 0]
    assert reads > 0
    assert [path.name for path in folder.iterdir()] == ["kernels.bin"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """B28: and once there is room, code is kept again."""

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    folder = tmp_path / "kernels" / ("0" * 32)
    folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(warmup.os, "replace", full)
        with pytest.raises(StorageError, match=f"takes nothing: {os.strerror(number)}"):
            warmup._store(folder, [b"code"], {"name": "symbol"})
    assert not list(folder.iterdir())
    warmup._store(folder, [b"code"], {"name": "symbol"})
    assert [path.name for path in folder.iterdir()] == ["kernels.bin"]
