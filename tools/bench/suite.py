"""The suite: what is measured of whom, in which order, and what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_llm_cli.progress import ProgressDisplay

from edge_llm.install import catalog, pull
from edge_llm.install.importer import resolve
from edge_llm.install.store import ModelStore
from edge_llm.model.manifest import TOKENIZER_NAME, ModelManifest
from edge_llm.text.tokenizer import Tokenizer
from tools.bench import cells, whole_process
from tools.bench.contest import Contest
from tools.bench.figures import CellResult
from tools.bench.model_cost import ModelCost
from tools.bench.peers import LIMIT, Contestant, MissingPeerError, machine_limit, ourselves, read_peers
from tools.bench.whole_process import Question
from tools.bench.worker_process import ROOT

DEFAULT_MODEL = "smollm2-135m-instruct"
_TEXT = ROOT / "tools" / "eval" / "english.txt"
_SEQUENCES = 16
_CONTEXT = 8192
_PROCESS_CONTEXT = 4096

Note = Callable[[str], None]
"""takes a line about what is going on"""


@dataclass(frozen=True)
class Settings:
    """`gguf` None is the default model; `pythons` are those of peers that have no environment in `work`."""

    gguf: Path | None
    peers: Sequence[str]
    pythons: Mapping[str, Path]
    work: Path
    threads: int
    rounds: int
    timeout_s: float
    quick: bool
    sections: Sequence[str] = ()
    """only these sections of the tables, with all threads; none: everything"""


@dataclass
class Outcome:
    """All that a run found, `results` and `limits` by the number of threads."""

    manifest: ModelManifest
    source: Path
    load: float
    contestants: Sequence[Contestant]
    skipped: Mapping[str, str]
    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[int, list[CellResult]] = field(default_factory=dict)
    limits: dict[int, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0


def run(settings: Settings, note: Note) -> Outcome:
    """Measure everything. Raises `InputError` and its kinds for a model or a peer that cannot be had at all."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    settings.work.mkdir(parents=True, exist_ok=True)
    with ProgressDisplay() as progress:
        source = settings.gguf or _default_gguf(settings.work, progress)
        folder = resolve(str(source), progress)
    manifest = ModelManifest.read(folder)
    contestants, skipped = _contestants(settings, source, folder, f"{source.stem}-{manifest.source.sha256[:8]}", note)
    outcome = Outcome(manifest, source, load, contestants, skipped)
    texts = _Texts(Tokenizer.from_file(folder / TOKENIZER_NAME))
    context = min(_CONTEXT, outcome.manifest.dimensions.context)
    for threads, group in _groups(settings, texts).items():
        outcome.results[threads] = _measured(settings, outcome, threads, context, group, note)
    if not settings.sections:
        outcome.results[settings.threads] += _whole_processes(settings, contestants, texts, context, note)
    cost = ModelCost.of_folder(folder)
    outcome.limits = {threads: _limits(results, cost) for threads, results in outcome.results.items()}
    outcome.seconds = time.perf_counter() - started
    return outcome


class _Texts:
    """English prose of so many tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode_raw(_TEXT.read_text("utf-8"))

    def of(self, tokens: int) -> str:
        return self._tokenizer.decode((self._ids * (tokens // len(self._ids) + 1))[:tokens])


def _default_gguf(work: Path, progress: ProgressDisplay) -> Path:
    """The default model's file, fetched once and kept in `work`: the store of models does not keep it."""
    recipe = catalog.get(DEFAULT_MODEL)
    target = work / "models" / recipe.source.file
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with ModelStore().lock(recipe.name):
            pull.fetch(recipe, progress).replace(target)
    return target


def _contestants(
    settings: Settings, source: Path, folder: Path, label: str, note: Note
) -> tuple[list[Contestant], dict[str, str]]:
    """All that can take part, and for each peer that cannot what would change that."""
    contestants, skipped = [ourselves(folder), machine_limit(folder)], {}
    for peer in read_peers(settings.peers):
        try:
            contestants += peer.contestants(source, label, settings.work, settings.pythons.get(peer.name))
        except MissingPeerError as error:
            skipped[peer.name] = str(error)
            note(f"{peer.name} is skipped: {error}")
    return contestants, skipped


def _groups(settings: Settings, texts: _Texts) -> dict[int, list[cells.Cell]]:
    """What is measured with how many threads."""
    prompts = {tokens: texts.of(tokens) for tokens in (32, 512)}
    if settings.quick:
        return {settings.threads: cells.quick(prompts)}
    groups = {settings.threads: cells.all_threads(prompts, settings.rounds)}
    if settings.sections:
        return {settings.threads: [cell for cell in groups[settings.threads] if cell.section in settings.sections]}
    if settings.threads > 1:
        groups[1] = cells.one_thread(settings.rounds)
    return groups


def _measured(
    settings: Settings, outcome: Outcome, threads: int, context: int, group: Sequence[cells.Cell], note: Note
) -> list[CellResult]:
    contest = Contest(
        outcome.contestants,
        threads=threads,
        context=context,
        sequences=_SEQUENCES,
        logs=settings.work,
        timeout_s=settings.timeout_s,
    )
    results = []
    with contest:
        for cell in group:
            if cell.room > context:
                note(f"{cell.section} {cell.label} is left out: the model has a context of {context} tokens")
                continue
            results.append(contest.measure(cell))
            note(_summary(results[-1], threads))
    outcome.info |= contest.info
    return results


def _whole_processes(
    settings: Settings, contestants: Sequence[Contestant], texts: _Texts, context: int, note: Note
) -> list[CellResult]:
    """A short prompt in several rounds; and one that fills the context, once: its time is not what it is for."""
    everybody = [contestant for contestant in contestants if contestant.name != LIMIT]
    context = min(context, _PROCESS_CONTEXT)
    rounds = 1 if settings.quick else settings.rounds
    questions = [(Question(texts.of(16), 16, 1, context, settings.threads), rounds)]
    if not settings.quick:
        tokens = context - 16
        questions.append((Question(texts.of(tokens), tokens, 8, context, settings.threads), 1))
    results = []
    for question, turns in questions:
        for result in whole_process.measure(
            everybody, question, rounds=turns, logs=settings.work, timeout_s=settings.timeout_s
        ):
            results.append(result)
            note(_summary(result, settings.threads))
    return results


def _limits(results: Sequence[CellResult], cost: ModelCost) -> dict[str, float]:
    """What the limit's own figures say of this machine: 10^9 bytes read and 10^9 operations done a second."""
    found: dict[str, float] = {}
    for result in results:
        figure, arguments = result.figure(LIMIT), result.cell.arguments
        if figure is not None and result.cell.kind == "decode":
            nbytes = cost.step_bytes(arguments["depth"] + arguments["tokens"] // 2)
            found.setdefault("read_gb_per_s", figure.median * nbytes / 1e9)
        elif figure is not None and result.cell.kind == "prefill":
            operations = cost.operations(0, arguments["tokens"])
            found["dot_gop_per_s"] = figure.median * operations / arguments["tokens"] / 1e9
    return found


def _summary(result: CellResult, threads: int) -> str:
    figures = [f"{name} {figure.median:.4g}" for name in result.values if (figure := result.figure(name)) is not None]
    failed = [f"{name} failed" for name in result.failures]
    return f"{result.cell.section} {result.cell.label}, -t {threads}: " + ", ".join([*figures, *failed])
