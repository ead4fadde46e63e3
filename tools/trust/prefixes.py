"""The prefix cache on disk: F1 (kills), F3 (flipped bits), F4 (failing calls), F5 (damage), F6 (sharing), F29 (namespaces).

python -m tools.trust.prefixes F1|F3|F4|F5|F6|F29 [--size commit|nightly] [--seed N]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tools.trust import prefix_trials
from tools.trust.figure import Figure


def _figure(number: str, what: str, trials: Callable[[int, int], int], commit: int, nightly: int) -> Figure:
    sizes = {"commit": commit, "nightly": nightly}
    return Figure(number, what, f"python -m tools.trust.prefixes {number}", sizes, trials)


FIGURES = {
    figure.number: figure
    for figure in (
        _figure("F1", "prefix blocks whose writer is killed", prefix_trials.kills, 300, 10_000),
        _figure("F3", "bits and lengths of a prefix block", prefix_trials.flips, 20_000, 1_000_000),
        _figure("F4", "failing calls of the system under the prefix cache", prefix_trials.faults, 1, 20),
        _figure("F5", "answers after damage to the prefix cache", prefix_trials.damages, 50, 2_000),
        _figure("F6", "blocks asked for by four processes that share a prefix cache", prefix_trials.sharing, 5, 300),
        _figure("F29", "prompts under another namespace", prefix_trials.namespaces, 100, 5_000),
    )
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in FIGURES:
        sys.exit(__doc__)
    sys.exit(FIGURES[sys.argv[1]].main(sys.argv[2:]))
