"""The profile of this machine: what `edge-llm tune` measured here and chose, in one small JSON file of the data folder.

Settings of a profile count only where they were measured: on this machine, with as many CPUs to use, by this version. What
cannot be read, or was measured elsewhere, is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import edge_llm
from edge_llm import machine, paths
from edge_llm.config import check_setting
from edge_llm.errors import InputError, ParameterError

NAME = "tuning.json"
FORMAT = 1
TUNABLE = ("threads", "max_chunk", "spin_us", "slots")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Decision:
    """One setting, and the value that was chosen for it; the usual one if nothing was faster beyond chance."""

    setting: str
    usual: int
    chosen: int
    gain: float
    """how much faster the chosen value is: 0.1 is 10 %; median of the rounds"""
    rounds: int
    tried: tuple[int, ...]
    """the other values"""

    @property
    def changes(self) -> bool:
        return self.chosen != self.usual

    def __str__(self) -> str:
        if self.changes:
            return f"{self.chosen} in place of {self.usual}: {self.gain:.0%} faster ({self.rounds} rounds)"
        if not self.tried:
            return f"{self.usual} stays: there is nothing else to try"
        others = " and ".join(map(str, self.tried))
        return f"{self.usual} stays: no difference found in favour of {others} ({self.rounds} rounds)"


@dataclass(frozen=True)
class Profile:
    """What was measured, of which model, and when."""

    model: str
    measured: str
    """the day, as 2026-11-30"""
    decisions: tuple[Decision, ...]

    @property
    def settings(self) -> dict[str, int]:
        """The settings that differ from the defaults."""
        return {decision.setting: decision.chosen for decision in self.decisions if decision.changes}

    def encoded(self) -> bytes:
        """The file's bytes."""
        head = {"format": FORMAT, "version": edge_llm.__version__, "machine": machine_identity()}
        return json.dumps(head | asdict(self), indent=1).encode() + b"\n"


def profile_path() -> Path:
    """Where the profile lies, if there is one."""
    return paths.data_dir() / NAME


def read_profile(path: Path | None = None) -> Profile | None:
    """The profile of this machine, or None where nothing was measured. Raises `InputError` for one that does not count."""
    file = profile_path() if path is None else path
    try:
        with file.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror}") from None
    return _decoded(data)


def machine_identity() -> str:
    """A digest of what the measurements depend on: the CPU, and how many of its cores this process may use."""
    usable = machine.usable_cpus()
    cpu = machine.cpu_identity() or f"{platform.machine()} {platform.processor()} {os.cpu_count()}"
    facts = [cpu, len(usable), machine.physical_cores(usable), machine.cpu_quota()]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _decoded(data: bytes) -> Profile:
    """Raises `InputError` for anything that `Profile.encoded` does not write here and now."""
    unsound = InputError("it is not sound")
    try:
        document = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        raise unsound from None
    if not isinstance(document, dict):
        raise unsound
    if document.get("format") != FORMAT or document.get("version") != edge_llm.__version__:
        raise InputError("another version of edge-llm measured it")
    if document.get("machine") != machine_identity():
        raise InputError("it was measured on another machine, or with other CPUs to use")
    model, measured, rows = (document.get(name) for name in ("model", "measured", "decisions"))
    if not isinstance(model, str) or not isinstance(measured, str) or not isinstance(rows, list):
        raise unsound
    try:
        decisions = tuple(_decision(row) for row in rows)
    except (ParameterError, ValueError):
        raise unsound from None
    if len({decision.setting for decision in decisions}) != len(decisions):
        raise unsound
    return Profile(model, measured, decisions)


def _decision(row: object) -> Decision:
    """Raises `ValueError` or `ParameterError` for what is none."""
    if not isinstance(row, Mapping) or set(row) != {field.name for field in fields(Decision)}:
        raise ValueError
    values: dict[str, Any] = dict(row)
    gain, rounds, tried = values["gain"], values["rounds"], values["tried"]
    if values["setting"] not in TUNABLE or not isinstance(tried, list):
        raise ValueError
    for value in (values["usual"], values["chosen"], *tried):
        check_setting(values["setting"], values["setting"], value)
        if value is None:
            raise ValueError
    if not isinstance(gain, float) or not 0 <= gain < math.inf:
        raise ValueError
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
        raise ValueError
    return Decision(**(values | {"tried": tuple(tried)}))
