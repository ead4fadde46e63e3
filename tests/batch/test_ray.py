"""Batches on a local Ray cluster: what they say is what one engine says. Runs where the extra `ray` is installed."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
from edge_llm_batch.endpoints import Defaults
from edge_llm_batch.ray_run import run_on_ray
from edge_llm_batch.run import Tally

from edge_llm.errors import InputError
from tests.batch.rig import Kept, chat, completion, embeddings, jsonl, results_of
from tests.batch.test_run import settled
from tests.cli.conftest import ROOT
from tests.engine.fakes import make_core
from tools.trust.batch_child import opener

LINES = [
    *(completion(f"r{i}", f"Number {i}", seed=i, temperature=1) for i in range(150)),
    "{",
    chat("r3"),
    chat("long", "x" * 5000),
    embeddings("e"),
    chat("last"),
]


def test_without_ray_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    worker = (partial(opener(0.0), "fake", None), Defaults("fake", 8))
    with pytest.raises(InputError, match="not installed"):
        run_on_ray(os.devnull, b"job", lambda _: True, worker, Kept(), lambda _: None, workers=1)


@pytest.mark.filterwarnings("ignore")
def test_actors_answer_as_one_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "apps"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + jsonl(LINES))
    kept, tallies = Kept(), []
    worker = (partial(opener(0.0), "fake", None), Defaults("fake", 8))

    def told(tally: Tally) -> None:
        tallies.append((tally.answered, tally.errors))

    run_on_ray(str(path), b"job", lambda line: line.number != 6, worker, kept, told, workers=2)
    expected = [result for i, result in enumerate(results_of(make_core(), LINES)) if i != 4]
    assert len(kept.lines) == len(LINES) - 1
    assert tallies[-1] == (151, 3)
    for one, other in zip(kept.in_order(), expected, strict=True):
        assert one["custom_id"] == other["custom_id"]
        assert (one["response"] is None) == (other["response"] is None)
        assert settled((one["response"] or {}).get("body")) == settled((other["response"] or {}).get("body"))
