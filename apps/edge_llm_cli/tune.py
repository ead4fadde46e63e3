"""`edge-llm tune`: which settings are fastest on this machine, measured once and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_llm import machine
from edge_llm.errors import RuntimeFailure, StorageError
from edge_llm_cli import answer, console
from edge_llm_cli.models import JsonOption
from edge_llm_cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from edge_llm.profile import Profile

_MOST_WAITING = 0.05
"""of the time, for a CPU that another program has"""


def tune(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Name of a model, its folder, or a FILE.gguf.")
    ] = answer.DEFAULT_MODEL,
    busy: Annotated[bool, typer.Option("--busy", help="Measure even while other programs keep the CPU busy.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget what was measured: the defaults again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure once which settings are fastest here, and use them from now on. About a minute; nothing else should run.

    What you set yourself, in config.toml or otherwise, still wins. Ctrl-C leaves everything as it was.
    """
    from edge_llm.profile import profile_path

    path = profile_path()
    if reset:
        if there := path.exists():
            path.unlink(missing_ok=True)
        if as_json:
            console.data({"removed": there})
        else:
            console.line("the defaults count again" if there else "nothing was measured: the defaults count")
        return
    _require_room(path.parent)
    profile = _measured(model, busy_too=busy)
    _keep(profile)
    if as_json:
        console.data({"file": str(path), "settings": profile.settings, **dataclasses.asdict(profile)})
        return
    console.table([("setting", "result"), *((decision.setting, str(decision)) for decision in profile.decisions)])
    kept = f"kept in {path}; edge-llm tune --reset forgets it"
    console.note(kept if profile.settings else f"the defaults are right for this machine; {kept}")


def _require_room(folder: Path) -> None:
    """Raises `StorageError` before minutes are spent on what cannot be kept."""
    from edge_llm import paths

    if (reason := paths.obstacle(folder)) is not None:
        raise StorageError(
            f"nothing can be kept in {folder}: {reason}", hint="set EDGE_LLM_HOME to a folder you can write to"
        )


def _measured(model: str, *, busy_too: bool) -> Profile:
    """The decisions on a model of this machine. Raises `RuntimeFailure` if other programs are in the way, and what opening an
    engine raises."""
    from edge_llm.config import load_config
    from edge_llm.engine import tuning
    from edge_llm.install.importer import resolve
    from edge_llm.profile import Profile

    config = load_config(tuned=False)
    decisions = []
    with ProgressDisplay() as progress:
        folder = resolve(model, progress)
        rig = tuning.EngineRig(folder, progress)
        try:
            name = rig.open(config).info.name
            with _quiet_machine(busy_too):
                rig.adapt(config)
            contests = tuning.tune(rig, config, most_slots=tuning.most_slots(folder, config), progress=progress)
            while True:
                with _quiet_machine(busy_too):
                    decision = next(contests, None)
                if decision is None:
                    break
                decisions.append(decision)
        finally:
            rig.close()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Profile(name, today, tuple(decisions))


@contextlib.contextmanager
def _quiet_machine(busy_too: bool) -> Iterator[None]:
    """Raises `RuntimeFailure` if other programs took the CPU away meanwhile: what is fastest beside them may not be without."""
    waited, start = machine.waited_for_cpu(), time.monotonic()
    yield
    now = machine.waited_for_cpu()
    if busy_too or waited is None or now is None:
        return
    share = (now - waited) / (time.monotonic() - start)
    if share > _MOST_WAITING:
        raise RuntimeFailure(
            f"other programs took the CPU {share:.0%} of the time: nothing was kept",
            hint="end them and try again, or measure all the same with --busy",
        )


def _keep(profile: Profile) -> None:
    """Write the file whole or not at all. Raises `StorageError`."""
    from edge_llm.install.staging import lock, publish, staging, storage_error
    from edge_llm.profile import profile_path, read_profile

    target = profile_path()
    with lock(target.parent, target.name), staging(target.parent, target.name) as folder:
        file = folder / target.name
        try:
            file.write_bytes(profile.encoded())
        except OSError as error:
            raise storage_error(error, target.parent) from None
        assert read_profile(file) == profile
        publish(file, target)
