"""The quality watch: what it finds is in the metrics and the log, and it is in nobody's way."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import pytest

from edge_llm.engine.client import ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.install.golden import MOST_KL, Golden, measure
from tests.engine.fakes import hashed_logits, make_core
from tests.server.harness import Running, running
from tests.server.test_life import until


def core() -> EngineCore:
    return make_core(hashed_logits, slots=1, context=1024)


@pytest.fixture(scope="module")
def golden() -> Golden:
    client = ThreadClient(core())
    try:
        return measure(client)
    finally:
        client.close()


def findings(server: Running) -> list[dict[str, Any]]:
    return [entry for entry in server.log if entry["event"] == "quality"]


def gauges(server: Running) -> list[str]:
    text = httpx.get(f"{server.url}/metrics").text
    return [line for line in text.splitlines() if line.startswith("edge_llm:quality_kl")]


def notice(server: Running) -> str:
    return str(httpx.get(f"{server.url}/v1/models/fake").json()["meta"]["notice"])


def test_a_model_as_it_was_is_found_so(golden: Golden) -> None:
    with running(core, goldens={"fake": golden}, quality_watch_s=3600) as server:
        until(lambda: findings(server))
        (found,) = findings(server)
        assert (found["model"], found["kl"], found["as_imported"]) == ("fake", 0.0, True)
        assert gauges(server) == ['edge_llm:quality_kl{model_name="fake"} 0.0']
        assert notice(server) == ""


def test_a_model_that_has_changed_shows(golden: Golden) -> None:
    def other(ids: list[int]) -> np.ndarray:
        return hashed_logits([*ids, 1])

    def changed() -> EngineCore:
        return make_core(other, slots=1, context=1024)

    with running(changed, goldens={"fake": golden}, quality_watch_s=1) as server:
        until(lambda: len(findings(server)) >= 2)  # again and again
        assert findings(server)[0]["as_imported"] is False
        (line,) = gauges(server)
        assert float(line.split()[-1]) > MOST_KL
        assert notice(server) == "fake no longer says what it said when it was imported"


def test_a_model_that_cannot_answer_shows(golden: Golden) -> None:
    def broken() -> EngineCore:
        return make_core(lambda ids: np.full_like(hashed_logits([1]), math.nan), slots=1, context=1024)

    with running(broken, goldens={"fake": golden}, quality_watch_s=3600) as server:
        until(lambda: findings(server))
        assert findings(server)[0]["fault"] == "GenerationError"
        assert gauges(server) == ['edge_llm:quality_kl{model_name="fake"} +Inf']


@pytest.mark.parametrize("goldens", [False, True])
def test_nobody_is_asked_without_need(golden: Golden, goldens: bool) -> None:
    settings = {"goldens": {"fake": golden}} if goldens else {"quality_watch_s": 3600}
    with running(core, **settings) as server:
        body = {"prompt": "hello", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        assert server.core.statistics().request_success == {"length": 1}
        assert gauges(server) == []
        assert findings(server) == []
