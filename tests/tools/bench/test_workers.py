"""Our own two workers, on the tiny model and in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import cells
from tools.bench.limit_kernels import LOWERING, Limits
from tools.bench.model_cost import Layer, ModelCost
from tools.bench.workers.edge import EdgeWorker
from tools.bench.workers.limit import LimitWorker
from tools.bench.workers.protocol import Options, token_ids

TEXT = "The answer to the question is Paris, the capital of France, as people know."


def test_our_worker_measures_everything_and_leaves_the_engine_idle(tiny_folder: Path, kernels: object) -> None:
    worker = EdgeWorker(Options(str(tiny_folder), threads=2, context=256, sequences=3))
    assert worker.info()["kv_type"] == "int8"
    requests = [
        cells.decode(100, 4, 1),
        cells.prefill(64, 1),
        cells.batch(3, 4, 1),
        cells.batch(1, 4, 1),
        *cells.text_cells(TEXT, 1),
    ]
    for cell in requests:
        assert getattr(worker, cell.kind)(**cell.arguments) > 0
        assert not worker._core.has_work
    assert worker.answer(TEXT, 3) == len(worker._core.intake.tokenizer.encode_raw(TEXT)) + 3


def test_a_batch_that_cannot_run_is_an_error_and_leaves_the_engine_idle(tiny_folder: Path, kernels: object) -> None:
    worker = EdgeWorker(Options(str(tiny_folder), threads=1, context=256, sequences=1))
    with pytest.raises(Exception, match="exceeds the available context"):
        worker.batch(1, 256, 4)
    assert worker.batch(1, 16, 4) > 0


def test_everybody_gets_the_same_tokens() -> None:
    assert token_ids(100, 1000) == token_ids(200, 1000)[:100]
    assert set(token_ids(100, 300)) <= set(range(256, 300))
    assert set(token_ids(9, 1)) == {0}


def test_the_cost_of_a_step_is_that_of_the_files(tiny_folder: Path) -> None:
    """The tiny model: 2 layers, 4 heads of 16 over 2 of keys and values, hidden 64, 96 between, 331 tokens, Q4_1 and Q8_0."""
    cost = ModelCost.of_folder(tiny_folder)
    body = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 64 * 192 + 96 * 64)
    padded_vocab = 336
    assert cost.row_operations == 2 * body
    assert cost.logit_operations == 2 * 331 * 64
    assert cost.weight_bytes == body * 20 // 32 + padded_vocab * 64 * 34 // 32
    assert cost.layers == (Layer(row_bytes=2 * 2 * (16 + 4), row_operations=4 * 4 * 16, window=None),) * 2
    assert cost.step_bytes(9, sequences=3) == cost.weight_bytes + 3 * 2 * 10 * 80
    assert cost.operations(10, 2) == 2 * cost.row_operations + cost.logit_operations + 2 * 256 * (11 + 12)


def test_a_window_bounds_what_is_read() -> None:
    cost = ModelCost(1000, 10, 5, (Layer(8, 2, None), Layer(8, 2, 4)))
    assert cost.step_bytes(99) == 1000 + 8 * (100 + 4)
    assert cost.operations(2, 3) == 30 + 5 + 2 * (3 + 4 + 5) + 2 * (3 + 4 + 4)


def test_the_limit_takes_as_long_as_the_work_is_large(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = LimitWorker(Options(str(tiny_folder), threads=1, context=256, sequences=2))
    clock = iter(range(10**6))
    monkeypatch.setattr("tools.bench.workers.limit.time.perf_counter", lambda: next(clock) * 0.5)
    worker._limits = FixedLimits(nbytes=10**6, operations=10**12)
    assert worker.decode(16, 8) == pytest.approx(0.5 * 8 * worker._cost.step_bytes(20) / 10**6)
    assert worker.batch(2, 16, 8) == pytest.approx(0.5 * 8 * worker._cost.step_bytes(20, 2) / 10**6)
    worker._limits = FixedLimits(nbytes=10**12, operations=10**6)
    assert worker.prefill(0, 100) == pytest.approx(0.5 * worker._cost.operations(0, 100) / 10**6)
    assert worker.batch(2, 16, 8) == pytest.approx(0.5 * 2 * worker._cost.operations(16, 8, logits=8) / 10**6)


class FixedLimits:
    """What a machine does in the half second that the test's clock lets pass."""

    def __init__(self, nbytes: int, operations: int) -> None:
        self._nbytes, self._operations = nbytes, operations

    def read(self, nbytes: int, passes: int) -> int:
        return self._nbytes

    def multiply(self, operations: int) -> int:
        return self._operations


@pytest.mark.parametrize("threads", [1, 2])
def test_the_limits_count_what_they_do(threads: int) -> None:
    limits = Limits(threads, 100_000)
    vector = 4 * LOWERING.lanes
    stride = 8 * vector
    share = 100_000 // threads
    assert limits.read(50_000, 3) == 3 * threads * (50_000 // threads // stride * stride)
    assert share * threads <= limits.read(10**9, 1) < share * threads + threads * stride
    done = limits.multiply(10**7)
    assert 0 < done <= 10**7 + threads * 10**5
    assert limits.multiply(1) < 10**5


def test_every_byte_is_read_and_every_product_made() -> None:
    from tools.bench import limit_kernels as kernels

    limits = Limits(1, 10_000)
    memory = limits._memory[0]

    def total() -> int:
        return kernels._read_passes.ctypes(memory.ctypes.data, memory.size, 1)

    untouched = total()
    for place in (0, 63, 64, memory.size // 2 + 1, memory.size - 1):
        memory[place] = 3
        assert total() != untouched, place
        memory[place] = 1
    codes, activations = limits._codes[0], limits._activations[0]
    codes[:] = 5
    activations[:] = -3
    turns, products = 3, kernels._STEPS * kernels._CODES * kernels._ROWS * 4 * LOWERING.lanes
    assert kernels._multiply_turns.ctypes(codes.ctypes.data, activations.ctypes.data, turns) == -15 * turns * products
