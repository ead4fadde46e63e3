"""Tuning: which settings make a model faster on this machine, one after the other, each with those that were chosen before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edge_llm import machine
from edge_llm.config import EngineConfig, default_context, default_threads
from edge_llm.engine.assembly import cache_geometry, open_engine
from edge_llm.engine.benchmark import Benchmark
from edge_llm.engine.contest import ROUNDS, contest
from edge_llm.engine.core import EngineCore
from edge_llm.errors import InputError
from edge_llm.kernels.layout import KvType
from edge_llm.model.manifest import ModelManifest
from edge_llm.profile import Decision

Progress = Callable[[str, int, int], None]
_CONTEXT = 2048
_LONG_PROMPT, _PROMPT, _ANSWER, _OPENING = 1024, 256, 64, 64
"""tokens of a long prompt, of the prompt and the answer of a turn, and of what one of many conversations begins with"""
_LONGEST_TURN_S = 1.0


class Rig(Protocol):
    """What measures. All are seconds, of an engine with this config."""

    def turn(self, config: EngineConfig) -> float:
        """To read a prompt and to generate an answer, by the model alone."""
        ...

    def long_prompt(self, config: EngineConfig) -> float:
        """To read a prompt of several chunks, by the model alone."""
        ...

    def tokens(self, config: EngineConfig, conversations: int) -> float:
        """Of a token, while so many conversations are answered at once: choosing it and all else that an engine does
        included."""
        ...

    def close(self) -> None:
        """Free the engines of this contest."""
        ...


@dataclass(frozen=True)
class Knob:
    """A setting, what else it might be, what shows the difference, and how great it must be."""

    setting: str
    others: Callable[[int], list[int]]
    """from the usual value"""
    measure: Callable[[Rig, EngineConfig], float]
    margin: float


def thread_counts(usual: int) -> list[int]:
    """Fewer than `usual`, for cores that are slower or shared, and all CPUs where cores have several."""
    fewer = {usual // 2, usual * 3 // 4, usual - 1} - {0}
    return sorted((fewer | {len(machine.usable_cpus())}) - {usual})


KNOBS = (
    Knob("threads", thread_counts, lambda rig, config: rig.turn(config), 0.03),
    # a large chunk takes more memory, and many conversations are each answered more slowly
    Knob("max_chunk", lambda usual: [usual // 2, 2 * usual], lambda rig, config: rig.long_prompt(config), 0.05),
    Knob("spin_us", lambda usual: [usual // 4, 5 * usual], lambda rig, config: rig.tokens(config, 1), 0.03),
    Knob("slots", lambda usual: [2 * usual, 4 * usual], lambda rig, config: rig.tokens(config, config.slots), 0.10),
)


def tune(
    rig: Rig, config: EngineConfig, *, most_slots: int | None, progress: Progress = lambda _what, _done, _total: None
) -> Iterator[Decision]:
    """A decision on each knob that `config` leaves at its default. `most_slots` conversations have room in memory (None: any)."""
    for knob in KNOBS:
        if getattr(config, knob.setting) != getattr(EngineConfig, knob.setting):
            continue  # somebody has chosen already
        usual = usual_value(config, knob.setting)
        others = knob.others(usual)
        if knob.setting == "slots" and most_slots is not None:
            others = [slots for slots in others if slots <= most_slots]

        def told(
            rounds: int, what: str = f"trying {knob.setting}: {', '.join(map(str, sorted([usual, *others])))}"
        ) -> None:
            progress(what, rounds, ROUNDS)

        def measure(value: int, knob: Knob = knob, config: EngineConfig = config) -> float:
            return knob.measure(rig, config.with_options(**{knob.setting: value}))

        try:
            verdict = contest(usual, others, measure, margin=knob.margin, progress=told)
        finally:
            rig.close()
        if verdict.chosen != usual:
            config = config.with_options(**{knob.setting: verdict.chosen})
        yield Decision(knob.setting, usual, verdict.chosen, verdict.gain, verdict.rounds, tuple(others))


def usual_value(config: EngineConfig, setting: str) -> int:
    """What the config makes of a setting; a default that follows the machine as its number."""
    value: int | None = getattr(config, setting)
    if value is None:
        assert setting == "threads"
        return min(default_threads(), len(machine.usable_cpus()))
    return value


def most_slots(folder: Path, config: EngineConfig) -> int | None:
    """Conversations whose whole contexts half of the free memory holds, as the engine's budget has it; None where nobody
    says."""
    free = machine.available_memory()
    if free is None:
        return None
    manifest = ModelManifest.read(folder)
    row = cache_geometry(manifest).row_bytes(KvType[(config.kv_type or manifest.kv_type).upper()])
    context = config.context or default_context(manifest.dimensions.context, row)
    return (config.kv_budget_bytes or free // 2) // (row * context)


class EngineRig:
    """Measures engines of a model folder, which stay open until the contest is over."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        manifest = ModelManifest.read(folder)
        self._folder, self._progress = folder, progress
        self._context = min(_CONTEXT, manifest.dimensions.context)
        self._ids: list[int] = np.random.default_rng(0).integers(0, manifest.dimensions.vocab, self._context).tolist()
        self._engines: dict[EngineConfig, tuple[EngineCore, Benchmark]] = {}
        self._share = 1.0
        """of the usual numbers of tokens; less on a slow machine"""

    def open(self, config: EngineConfig) -> EngineCore:
        """The engine of a config. Raises `InputError` where our own kernels do not run: the knobs are theirs."""
        return self._engine(config)[0]

    def adapt(self, config: EngineConfig) -> None:
        """See how fast this machine is, so that a turn takes about a second at most."""
        self.turn(config)  # pages are new
        self._share = min(1.0, _LONGEST_TURN_S / self.turn(config))

    def turn(self, config: EngineConfig) -> float:
        benchmark = self._engine(config)[1]
        prompt = self._some(_PROMPT)
        return benchmark.prefill(0, prompt) + benchmark.decode(prompt, self._some(_ANSWER))

    def long_prompt(self, config: EngineConfig) -> float:
        return self._engine(config)[1].prefill(0, min(_LONG_PROMPT, self._context))

    def tokens(self, config: EngineConfig, conversations: int) -> float:
        opening, steps = self._some(_OPENING), self._some(_ANSWER)
        prompts = [np.roll(self._ids, i)[:opening].tolist() for i in range(conversations)]
        return self._engine(config)[1].together(prompts, steps) / (steps * conversations)

    def close(self) -> None:
        for core, _ in self._engines.values():
            core.close()
        self._engines.clear()

    def _some(self, tokens: int) -> int:
        return max(4, int(min(tokens, self._context // 4) * self._share))

    def _engine(self, config: EngineConfig) -> tuple[EngineCore, Benchmark]:
        if config not in self._engines:
            measured = config.with_options(context=self._context, prefix_cache="off", speculation="off")
            core = open_engine(self._folder, measured, self._progress)
            if core.info.layout != "ring":
                core.close()
                raise InputError("there is nothing to tune: stock ops compute here", hint="edge-llm doctor says why")
            self._engines[config] = core, Benchmark(core, self._ids)
        return self._engines[config]
