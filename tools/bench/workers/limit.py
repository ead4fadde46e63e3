"""The machine's own limit as one more worker: reads the bytes and does the operations that each measurement cannot do without.

What takes longer of the two is the time below which no program could stay with this model's bytes on this machine.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tools.bench.limit_kernels import LOWERING, Limits
from tools.bench.model_cost import ModelCost
from tools.bench.workers import protocol

_READ_S = 0.2
_OPERATIONS = 10**11
"""as many as make a measurement steady; the time of more follows from it"""


class LimitWorker:
    def __init__(self, options: protocol.Options) -> None:
        self._cost = ModelCost.of_folder(Path(options.model))
        self._limits = Limits(options.threads, self._cost.step_bytes(options.context))

    def info(self) -> dict[str, Any]:
        return {"lowering": LOWERING.name}

    def prefill(self, depth: int, tokens: int) -> float:
        return self._seconds(self._cost.weight_bytes, self._cost.operations(depth, tokens))

    def decode(self, depth: int, tokens: int) -> float:
        return self.batch(1, depth, tokens)

    def batch(self, sequences: int, depth: int, tokens: int) -> float:
        nbytes = self._cost.step_bytes(depth + tokens // 2, sequences)
        operations = sequences * self._cost.operations(depth, tokens, logits=tokens)
        return self._seconds(tokens * nbytes, operations, nbytes)

    def _seconds(self, nbytes: int, operations: int, nbytes_once: int | None = None) -> float:
        """For reading `nbytes`, `nbytes_once` of them each time, and for so many operations, whichever takes longer."""
        once, seconds, read = nbytes_once or nbytes, 0.0, 0
        while seconds < _READ_S:
            start = time.perf_counter()
            read += self._limits.read(once, 4)
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        done = self._limits.multiply(min(operations, _OPERATIONS))
        return max(seconds * nbytes / read, (time.perf_counter() - start) * operations / done)


if __name__ == "__main__":
    protocol.run(LimitWorker)
