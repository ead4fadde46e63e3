"""The trials of F21, run by tools.trust.kernels. A trial is one call of a kernel: a step of attention, a product, a norm.

Attention is held against the rows as they were when they were written, so a row that lies in the wrong place, or is
read from there, shows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numba
import numpy as np

from edge_llm.kernels.layout import TILE, UNBOUNDED, Activation, KvType
from tests.kernels.attention_rig import TOLERANCE, Rig, Segment, Shape, random_rows
from tests.kernels.elementwise_rig import EPS, TRUTH, run_activation, run_norm
from tests.kernels.linear_rig import FORMS, Matrix, check_product
from tests.reference.attention import attend
from tests.reference.elementwise import rms_norm
from tools.trust.figure import Figure

_HEADS = ((1, 1), (3, 1), (4, 2), (9, 3), (2, 2), (8, 1))
_DIMS = (8, 16, 24, 40, 64, 72)
_WINDOWS = (1, 2, 3, 17, 63, 64, 65, 100, 127, 128, 129, 191, 256, 257, UNBOUNDED)
_CHUNKS = (0, 1, 1, 1, 2, 3, 4, 5, 16, 33, TILE)
_STEPS = 40
_WIDTHS = (1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 576)
_CODE_ERROR = 0.5001 / 127  # of the largest number in a key or value, what rounding it to a code may cost


def trials(count: int, seed: int) -> int:
    """Run at least `count` trials. Raises `AssertionError` with the seed of the first episode that fails."""
    done = number = 0
    while done < count:
        episode = (_attention, _attention, _attention, _linear, _elementwise)[number % 5]
        try:
            done += episode(np.random.default_rng([seed, number]))
        except Exception as error:
            raise AssertionError(f"{episode.__name__}(numpy.random.default_rng([{seed}, {number}]))") from error
        number += 1
    return done


# --- attention -------------------------------------------------------------------------------------------------------------


@dataclass
class _History:
    """What a slot was given: float64 [positions, kv_heads, dim], as it was stored when it was written."""

    keys: np.ndarray
    values: np.ndarray
    length: int = 0
    written: int = 0


class _Conversations:
    """Rings of a random shape, and their histories."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.shape = _shape(rng)
        self.rig = Rig(self.shape, seed=int(rng.integers(1 << 31)), at_end=bool(rng.integers(2)))
        rows = (3 * self.shape.capacity + _STEPS * 2 * TILE, self.shape.kv_heads, self.shape.dim)
        self.histories = [_History(np.zeros(rows), np.zeros(rows)) for _ in range(self.shape.slots)]
        self.steps = 0
        self._rng = rng

    def fill(self, rows: int) -> None:
        """Give each slot that many rows, in steps as large as its ring allows."""
        for slot, history in enumerate(self.histories):
            while history.length < rows:
                count = min(self._room(history.length), rows - history.length)
                self._run([self._segment(slot, history.length, count)])

    def step(self) -> None:
        """A step of some slots, in which drafts that were not accepted may be written again."""
        rng, segments = self._rng, []
        for slot in rng.permutation(self.shape.slots)[: rng.integers(1, self.shape.slots + 1)].tolist():
            history = self.histories[slot]
            start = history.length
            if rng.integers(4) == 0:
                earliest = max(0, min(start, history.written - self._room(history.written)))
                start = int(rng.integers(earliest, start + 1))
            room = self._room(start)
            segments.append(self._segment(slot, start, min(int(rng.choice([*_CHUNKS, room])), room)))
        if any(len(segment.qkv) for segment in segments):
            self._run(segments)

    def _room(self, start: int) -> int:
        """Rows that a step may write from `start` on."""
        if self.shape.window == UNBOUNDED:
            return min(TILE, self.shape.capacity - start)
        return self.shape.capacity - self.shape.sinks - self.shape.window + 1

    def _segment(self, slot: int, start: int, rows: int) -> Segment:
        return Segment(slot, start, random_rows(self.shape, rows, int(self._rng.integers(1 << 31))))

    def _run(self, segments: list[Segment]) -> None:
        """Run a step, remember what it stored, and hold it against the truth."""
        order = int(self._rng.choice([1, -1]))
        out = self.rig.step(segments, threads=int(self._rng.integers(1, 9)), order=order)
        for segment in segments:
            history, end = self.histories[segment.slot], segment.position + len(segment.qkv)
            for position in range(segment.position, end):
                history.keys[position], history.values[position] = self.rig.stored(segment.slot, position)
            history.length, history.written = end, max(history.written, end)
        first = 0
        for segment in segments:
            self._check(segment, out[first : first + len(segment.qkv)])
            first += len(segment.qkv)
        self.steps += 1

    def _check(self, segment: Segment, out: np.ndarray) -> None:
        shape, history, first = self.shape, self.histories[segment.slot], segment.position
        if not len(out):
            return
        keys, values = history.keys[: history.length], history.values[: history.length]
        self._check_stored(keys[first:], self.rig.keys(segment))
        self._check_stored(values[first:], segment.qkv[:, shape.heads + shape.kv_heads :])
        truth = attend(*self.rig.queries(segment), keys, values, first, shape.rules)
        assert np.abs(out - truth).max() <= TOLERANCE[shape.kv_type] * np.abs(values).max(), (shape, first)

    def _check_stored(self, stored: np.ndarray, given: np.ndarray) -> None:
        rounding = _CODE_ERROR if self.shape.kv_type is KvType.INT8 else 0.0
        assert (np.abs(stored - given) <= (rounding + 1e-6) * np.abs(given).max(-1, keepdims=True)).all(), self.shape


def _attention(rng: np.random.Generator) -> int:
    """Steps over rings of which some have wrapped a few times."""
    conversations = _Conversations(rng)
    capacity = conversations.shape.capacity
    far = (0, capacity // 2) if conversations.shape.window == UNBOUNDED else (0, 1, capacity, 3 * capacity)
    conversations.fill(int(rng.choice(far)))
    for _ in range(int(rng.integers(10, _STEPS))):
        conversations.step()
    return conversations.steps


def _shape(rng: np.random.Generator) -> Shape:
    heads, kv_heads = _HEADS[rng.integers(len(_HEADS))]
    dim = int(rng.choice(_DIMS))
    window, slack = int(rng.choice(_WINDOWS)), int(rng.choice([1, 2, 40]))
    sinks = 0 if window == UNBOUNDED else int(rng.choice([0, TILE, 2 * TILE, 5 * TILE]))
    rotary_dim = int(rng.choice([0, 2, dim]))
    return Shape(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        kv_type=KvType(int(rng.integers(2))),
        slots=int(rng.integers(1, 4)),
        capacity=10 * TILE if window == UNBOUNDED else sinks + -(-(window + slack - 1) // TILE) * TILE,
        sinks=sinks,
        window=window,
        rotary_dim=rotary_dim,
        norms=bool(rng.integers(2)),
        softcap=float(rng.choice([0.0, 0.0, 5.0, 30.0])),
        sink_rope=sinks > 0 and rotary_dim > 0,
    )


# --- the other kernels -----------------------------------------------------------------------------------------------------


def _linear(rng: np.random.Generator) -> int:
    """Products of one matrix with rows of all magnitudes, and rows of it as a table."""
    form, outputs, inputs = FORMS[rng.integers(len(FORMS))], int(rng.integers(1, 70)), 32 * int(rng.integers(1, 5))
    matrix = Matrix(rng, form, outputs, inputs, bias=bool(rng.integers(2)), at_end=bool(rng.integers(2)))
    counts = rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 23, 24, 25, 49], 8)
    for rows in counts.tolist():
        x = rng.standard_normal((rows, inputs)) * 10 ** rng.uniform(-3, 3, (rows, 1))
        check_product(matrix, x.astype(np.float32))
    ids = rng.integers(0, outputs, 5).tolist()
    assert np.array_equal(matrix.embed(ids, 1.0), matrix.weights[ids])
    return len(counts) + 1


def _elementwise(rng: np.random.Generator) -> int:
    """Norms in groups, with and without a sum before, and gated activations."""
    count = 8
    for _ in range(count // 2):
        width, groups, rows = int(rng.choice(_WIDTHS)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
        x, delta = (rng.standard_normal((2, rows, width * groups)) * 10 ** rng.uniform(-4, 5)).astype(np.float32)
        gamma = rng.standard_normal(width).astype(np.float32)
        given = delta if rng.integers(2) else None
        normed, total = run_norm(x, gamma, given)
        expected = x if given is None else x + given
        assert total is None or np.array_equal(total, expected)
        np.testing.assert_allclose(normed, rms_norm(expected, gamma, EPS), rtol=4e-7)

        gate, up = (rng.standard_normal((2, rows, width)) * 10 ** rng.uniform(-2, 2)).astype(np.float32)
        kind = Activation(int(rng.integers(len(Activation))))
        error = np.abs(run_activation(gate, up, kind) - TRUTH[kind](gate.astype(np.float64)) * up)
        assert (error <= 4e-7 * np.abs(gate * up)).all(), (kind, width)
    return count


FIGURE = Figure(
    number="F21",
    what="kernels (attention over rings, products, norms, activations) against plain NumPy, bounds checked",
    command="python -m tools.trust.kernels",
    sizes={"commit": 2_000, "nightly": 200_000},
    trials=trials,
)

if __name__ == "__main__":
    assert numba.config.BOUNDSCHECK, "started by tools.trust.kernels"
    sys.exit(FIGURE.main(sys.argv[1:]))
