"""F22: state machines of the cache, of conversations over its rings, and of the engine, each beside a plain model.

python -m tools.trust.machines [--size commit|nightly] [--seed N]

A trial is one step of a machine, after which all that it promises is checked. What fails is shrunk and printed.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from edge_llm.kernels.layout import KvType
from edge_llm.kernels.warmup import load_kernels
from tests.cache.machine import CacheMachine
from tests.engine.test_core import EngineMachine
from tests.model.mixed import write_mixed
from tests.model.ring_machine import Model, RingMachine
from tools.trust.figure import Figure

_SETTINGS = settings(
    max_examples=4,
    stateful_step_count=50,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class _CountedEngine(EngineMachine):
    steps = 0

    @invariant()
    def count(self) -> None:
        type(self).steps += 1


_Kind = type[CacheMachine] | type[RingMachine] | type[_CountedEngine]


def trials(count: int, first_seed: int) -> int:
    """Run at least `count` steps, half of them over the bare cache, a tenth in the engine."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        kernels = load_kernels()
        write_mixed(folder)
        models = [Model(folder / "exported", kernels, kv_type, stack) for kv_type in KvType]
        done = _run(CacheMachine, CacheMachine, count // 2, first_seed)
        for model in models:
            done += _run(partial(RingMachine, model), RingMachine, count // 5, first_seed)
        return done + _run(_CountedEngine, _CountedEngine, count // 10, first_seed)


def _run(make: Any, kind: _Kind, count: int, first_seed: int) -> int:
    """Run machines until `kind` has counted that many steps; how many it was."""
    start, number = kind.steps, first_seed
    while kind.steps - start < count:
        seeded: Any = lambda: make()  # noqa: E731, PLW0108 (a seed is a mark on a function)
        run_state_machine_as_test(seed(number)(seeded), settings=_SETTINGS)
        number += 1
    return kind.steps - start


FIGURE = Figure(
    number="F22",
    what="state machines (cache, conversations over rings, engine) against plain models",
    command="python -m tools.trust.machines",
    sizes={"commit": 5_000, "nightly": 500_000},
    trials=trials,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main(sys.argv[1:]))
