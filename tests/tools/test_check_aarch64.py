"""What tools/check_aarch64 decides by itself; running it needs qemu and half a gigabyte."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tools.check_aarch64 import machine
from tools.check_aarch64.__main__ import compare

ANSWERS = {"same": True, "answers": [{"ids": [7, 8], "places": [[[7, -0.1], [9, -2.5]], [[8, -0.2], [3, -9.0]]]}]}


def test_equal_answers_pass() -> None:
    there = copy.deepcopy(ANSWERS)
    there["answers"][0]["places"][0][1][1] = -2.4
    there["answers"][0]["places"][1].pop()  # what is unlikely may differ
    assert "2 tokens equal" in compare(ANSWERS, there)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("same",), False, "changed the answers"),
        (("answers", 0, "ids", 1), 9, "tokens"),
        (("answers", 0, "places", 0, 1, 1), -2.0, "differ by up to 0.500"),
        (("answers", 0, "places", 0, 1, 0), 10, "differ by up to inf"),
    ],
)
def test_a_difference_is_told(path: tuple[str | int, ...], value: object, message: str) -> None:
    there = copy.deepcopy(ANSWERS)
    place: object = there
    for key in path[:-1]:
        place = place[key]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    with pytest.raises(ValueError, match=message):
        compare(ANSWERS, there)


def test_a_missing_program_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(machine.MissingToolError, match="apt-get install qemu-user-static mmdebstrap"):
        machine.Machine("pi5", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    target, calls = tmp_path / "folder", []

    def make(draft: Path) -> None:
        draft.mkdir()
        calls.append(draft)
        if len(calls) == 1:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        machine._once(target, make)
    assert not target.exists()
    for _ in range(2):
        assert machine._once(target, make).is_dir()
    assert len(calls) == 2


@pytest.mark.parametrize("board", machine.BOARDS.values(), ids=list(machine.BOARDS))
def test_the_boards_differ_where_the_kernels_care(board: machine.Board) -> None:
    text = machine._cpuinfo(board)
    assert text.count("processor\t:") == 4
    assert ("asimddp" in text) == (board.lowering == "neondot")
    assert text.endswith(f"{board.model}\n")
