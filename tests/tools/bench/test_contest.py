"""The contest with workers that are real processes without a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tools.bench import cells
from tools.bench.contest import Contest
from tools.bench.peers import Contestant
from tools.bench.worker_process import WorkerError, WorkerProcess, run_once

FAKE = "tests.tools.bench.fake_worker"


def fake(name: str, **flags: Any) -> Contestant:
    return Contestant(name, sys.executable, FAKE, name, flags)


def contest(tmp_path: Path, *contestants: Contestant, timeout_s: float = 30) -> Contest:
    return Contest(contestants, threads=3, context=64, sequences=1, logs=tmp_path, timeout_s=timeout_s)


def test_everybody_is_asked_in_turn_and_first_in_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with contest(tmp_path, fake("a", log=str(log), speed=200), fake("b", log=str(log))) as running:
        result = running.measure(cells.decode(16, 40, rounds=3))
    words = [line.split() for line in log.read_text().splitlines()]
    assert [(name, int(tokens)) for name, _, tokens in words[:2]] == [("a", 2), ("b", 2)]  # the warm-up
    assert "".join(name for name, _, _ in words[2:]) == "abbaab"
    assert {tokens for _, _, tokens in words[2:]} == {"40"}
    assert result.values == {"a": [pytest.approx(200)] * 3, "b": [pytest.approx(100)] * 3}
    assert result.ratio("a", "b").median == pytest.approx(2)
    assert running.info["a"] == {"threads": 3, "model": "a"}
    assert not result.failures


@pytest.mark.parametrize(
    ("flags", "timeout_s", "reason"),
    [
        ({"fails": "decode"}, 30, "ValueError: out of luck"),
        ({"dies": "decode"}, 30, "it ended (7)"),
        ({"hangs": "decode"}, 2, "no answer in 2 s"),
    ],
)
def test_a_cell_that_fails_costs_nobody_else_and_no_other_cell(
    tmp_path: Path, flags: dict[str, str], timeout_s: float, reason: str
) -> None:
    with contest(tmp_path, fake("good"), fake("bad", **flags), timeout_s=timeout_s) as running:
        failed = running.measure(cells.decode(16, 40, rounds=2))
        following = running.measure(cells.prefill(40, rounds=2))
    assert failed.failures.keys() == {"bad"}
    assert failed.failures["bad"].startswith(reason)
    assert failed.figure("good").median == pytest.approx(100)
    assert (failed.figure("bad"), failed.ratio("good", "bad")) == (None, None)
    assert following.failures == {}
    assert following.figure("bad").median == pytest.approx(100)


def test_a_worker_that_does_not_start_is_tried_once(tmp_path: Path) -> None:
    with contest(tmp_path, fake("good"), fake("bad", refuses=True)) as running:
        results = [running.measure(cells.decode(16, 4, rounds=1)) for _ in range(2)]
    for result in results:
        assert result.failures == {"bad": "its worker does not start: it ended (3): no such model"}
        assert result.figure("good") is not None
    assert (tmp_path / "bad-3.log").read_text().count("no such model") == 1


def test_what_a_worker_cannot_do_is_no_failure(tmp_path: Path) -> None:
    with contest(tmp_path, fake("a")) as running:
        result = running.measure(cells.batch(2, 4, rounds=2))
    assert (result.values, result.failures) == ({"a": [None, None]}, {})


def test_the_time_to_the_first_token_is_taken_by_the_worker(tmp_path: Path) -> None:
    with contest(tmp_path, fake("a")) as running:
        result = running.measure(cells.first_token("Hello", 1, rounds=1))
    assert 0 <= result.figure("a").median < 1000


def test_a_whole_process_says_what_memory_it_took(tmp_path: Path) -> None:
    contestant = fake("a")
    options = {"worker": contestant.options(1, 64), "prompt": "Hello", "max_tokens": 4}
    seconds, reply = run_once(contestant.command("answer", options), tmp_path / "log", 30)
    assert seconds > 0
    assert reply["tokens"] == 9
    assert reply["peak_rss"] is None or reply["peak_rss"] > 1e6
    with pytest.raises(WorkerError, match=r"it ended \(3\): no such model"):
        run_once(
            contestant.command("answer", options | {"worker": fake("b", refuses=True).options(1, 64)}),
            tmp_path / "b",
            30,
        )


def test_a_worker_is_closed_more_than_once(tmp_path: Path) -> None:
    worker = WorkerProcess(fake("a").command("serve", fake("a").options(1, 64)), tmp_path / "log", 30)
    assert worker.ask({"kind": "decode", "depth": 0, "tokens": 5}) == {"seconds": 0.05}
    worker.close()
    worker.close()
