"""Contestants: ourselves, the machine's limit, and the peers of peers.toml as far as they are installed here."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_llm.errors import ParameterError
from tools.bench.worker_process import ROOT, environment, last_line

OURS, LIMIT = "edge_llm", "limit"
PEERS_FILE = Path(__file__).with_name("peers.toml")
_CHECK_S, _PREPARE_S = 60, 1800


class MissingPeerError(Exception):
    """A peer cannot take part; the text says what would change that."""


@dataclass(frozen=True)
class Contestant:
    """One column of the tables: the program `python -m worker` on a model."""

    name: str
    python: str
    worker: str
    model: str
    flags: Mapping[str, Any] = field(default_factory=dict)

    def command(self, verb: str, options: Mapping[str, Any]) -> list[str]:
        return [self.python, "-m", self.worker, verb, json.dumps(options)]

    def options(self, threads: int, context: int, sequences: int = 1) -> dict[str, Any]:
        """What its worker is started with (`protocol.Options`)."""
        return {
            "model": self.model,
            "threads": threads,
            "context": context,
            "sequences": sequences,
            "flags": dict(self.flags),
        }


def ourselves(folder: Path) -> Contestant:
    return Contestant(OURS, sys.executable, "tools.bench.workers.edge", str(folder))


def machine_limit(folder: Path) -> Contestant:
    return Contestant(LIMIT, sys.executable, "tools.bench.workers.limit", str(folder))


@dataclass(frozen=True)
class Peer:
    """An entry of peers.toml; the file explains the fields."""

    name: str
    python: Sequence[str]
    module: str
    worker: str
    models: Mapping[str, str]
    flags: Mapping[str, Any]
    needs: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def contestants(self, source: Path, label: str, work: Path, python: Path | None = None) -> list[Contestant]:
        """One for each of its models, made out of the GGUF file `source` where it is not there yet.

        `label` tells that file from others; `python` is what runs the peer, by default that of the environment
        `work`/`name`. Raises `MissingPeerError`.
        """
        environment_folder = work / self.name
        python = python or environment_folder / "bin" / "python"
        if not _imports(python, self.module):
            venv = shlex.join(["python3", "-m", "venv", str(environment_folder)])
            variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.variables.items())
            pip = shlex.join([str(environment_folder / "bin" / "pip"), "install", *self.python])
            raise MissingPeerError(f"{venv} && {variables}{pip}")
        made = {
            column: self._make(source, work / "models" / f"{label}-{self.name}-{suffix}", python) if suffix else source
            for column, suffix in self.models.items()
        }
        return [Contestant(column, str(python), self.worker, str(model), self.flags) for column, model in made.items()]

    def _make(self, source: Path, target: Path, python: Path) -> Path:
        """Its own model, which appears whole or not at all."""
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        partial, log = target.with_name(f".{target.name}"), target.with_name(f"{target.name}.log")
        _remove(partial)
        maker = Contestant(self.name, str(python), self.worker, "")
        command = maker.command("prepare", {"source": str(source), "target": str(partial)})
        if not _succeeds(command, log) or not partial.exists():
            _remove(partial)
            pip = shlex.join([str(python), "-m", "pip", "install", *self.needs])
            why = f"{target.name} could not be made ({last_line(log)})"
            raise MissingPeerError(f"{why}; it needs: {pip}" if self.needs else why)
        partial.rename(target)
        return target


def _succeeds(command: Sequence[str], log: Path) -> bool:
    with log.open("wb") as output:
        try:
            return not subprocess.run(
                command, check=False, cwd=ROOT, env=environment(), stdout=output, stderr=output, timeout=_PREPARE_S
            ).returncode
        except subprocess.TimeoutExpired:
            output.write(f"it took longer than {_PREPARE_S} s".encode())
            return False


def read_peers(names: Sequence[str], file: Path = PEERS_FILE) -> list[Peer]:
    """The peers of these names. Raises `ParameterError` for one that is not in the file."""
    entries = tomllib.loads(file.read_text("utf-8"))
    for name in names:
        if name not in entries:
            raise ParameterError(f"no peer is called {name}", hint=f"known are: {', '.join(entries)}")
    return [Peer(name, **entries[name]) for name in names]


def _imports(python: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], check=False, timeout=_CHECK_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
