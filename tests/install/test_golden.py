"""Golden answers: what has changed shows, what has not does not, and a file of them is read as any stranger's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.config import EngineConfig
from edge_llm.engine.client import ThreadClient
from edge_llm.engine.handle import Handle, Mailbox
from edge_llm.errors import EngineStoppedError, KernelError, ModelFormatError
from edge_llm.install.golden import MOST_KL, PROMPTS, Drift, Golden, divergence, drift, measure, opened, record
from edge_llm.messages import Finished, FinishReason, Timings, Usage
from edge_llm.model.manifest import GOLDEN_NAME, MANIFEST_NAME, WEIGHTS_NAME, FileSpec, ModelManifest
from edge_llm.model.verify import verify
from tests.engine.fakes import hashed_logits, make_core

distributions = st.dictionaries(st.integers(0, 9), st.floats(-20, -1e-3), min_size=1, max_size=6)


@pytest.fixture
def folder(tiny_folder: Path, kernels: object, tmp_path: Path) -> Path:
    """A copy of the tiny model, with its golden answers."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    record(copy)
    return copy


def test_a_model_says_again_what_it_said(folder: Path) -> None:
    then = Golden.read(folder)
    assert then is not None
    assert tuple(then.distributions) == PROMPTS
    assert verify(folder).extra == ()
    with opened(folder, EngineConfig(threads=1)) as client:
        assert drift(then, client) == Drift(0.0, 0.0)
        assert client.statistics().request_success == {"length": len(PROMPTS)}


def test_weights_that_have_changed_show(folder: Path) -> None:
    weights = np.fromfile(folder / WEIGHTS_NAME, np.uint8)
    codes = np.random.default_rng(0).integers(0, 2, weights.size, np.uint8) << 1
    changed = (weights ^ codes).tobytes()
    (folder / WEIGHTS_NAME).write_bytes(changed)
    manifest = ModelManifest.read(folder)
    files = {**manifest.files, WEIGHTS_NAME: FileSpec(len(changed), hashlib.sha256(changed).hexdigest())}
    (folder / MANIFEST_NAME).write_text(dataclasses.replace(manifest, files=files).to_json(), "utf-8")
    then = Golden.read(folder)
    assert then is not None
    with opened(folder, EngineConfig(threads=1)) as client:
        found = drift(then, client)
    assert found.kl > MOST_KL
    assert not found.ok
    assert found.worst >= found.kl


def test_another_type_of_cache_is_no_drift(folder: Path) -> None:
    then = Golden.read(folder)
    assert then is not None
    with opened(folder, EngineConfig(threads=1, kv_type="f32")) as client:
        found = drift(then, client)
    assert 0.0 < found.kl <= MOST_KL


def test_a_model_that_does_not_run_here_has_none(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KernelError("no compiler")

    monkeypatch.setattr("edge_llm.engine.assembly.open_engine", fail)
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    record(copy)
    assert Golden.read(copy) is None
    assert sorted(entry.name for entry in copy.iterdir()) == sorted(entry.name for entry in tiny_folder.iterdir())


def test_an_engine_is_asked_when_it_has_nothing_else_to_do() -> None:
    client = ThreadClient(make_core(hashed_logits, slots=1, context=1024))
    asked = []
    watched = SimpleNamespace(submit=lambda request: asked.append(request) or client.submit(request))
    measure(watched)
    client.close()
    assert [(one.priority, one.cache, one.params.max_tokens) for one in asked] == [("batch", False, 1)] * len(PROMPTS)


def test_an_engine_that_ends_says_nothing_about_its_model() -> None:
    mailbox = Mailbox()
    mailbox.put(Finished(FinishReason.CANCELLED, Usage(1, 0), Timings(0.0, None, 0.0), seed=1))
    with pytest.raises(EngineStoppedError):
        measure(SimpleNamespace(submit=lambda _: Handle(mailbox, lambda: None)))


# --- divergence ---


@given(distributions)
def test_the_same_is_no_divergence(one: dict[int, float]) -> None:
    assert divergence(one, one) == 0.0


@given(distributions, distributions)
def test_a_divergence_is_a_number_and_never_negative(then: dict[int, float], now: dict[int, float]) -> None:
    assert 0.0 <= divergence(then, now) < math.inf


def test_it_is_the_kl_divergence() -> None:
    then, now = {1: math.log(0.5), 2: math.log(0.25)}, {2: math.log(0.5), 1: math.log(0.125)}
    expected = 0.5 * math.log(4) + 0.25 * math.log(0.5) + 0.25 * math.log(0.25 / 0.375)
    assert divergence(then, now) == pytest.approx(expected)
    gone = {3: math.log(0.5), 4: math.log(0.125)}  # at most an eighth for each of the others
    assert divergence(then, gone) == pytest.approx(
        0.5 * math.log(4) + 0.25 * math.log(2) + 0.25 * math.log(0.25 / 0.75)
    )


# --- the file ---


def test_a_file_comes_back_exactly() -> None:
    one = Golden({"a\né🗼": {3: -0.1, 5: -1 / 3}, "": {0: -1e-9}})
    assert Golden.from_json(one.to_json()) == one


ENTRY = {"text": "x", "logprobs": [[1, -0.5]]}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps({"version": 2, "prompts": [ENTRY]}),
        json.dumps({"version": 1, "prompts": []}),
        json.dumps({"version": 1, "prompts": [{"text": str(i), "logprobs": [[1, -0.5]]} for i in range(65)]}),
        *(
            json.dumps({"version": 1, "prompts": [{"text": "x", "logprobs": logprobs}]})
            for logprobs in (
                [],
                [[1]],
                [[1, 2, 3]],
                [["1", -0.5]],
                [[True, -0.5]],
                [[1, 0.5]],
                [[1, math.nan]],
                [1],
                {},
            )
        ),
        json.dumps({"version": 1, "prompts": [{"text": "x", "logprobs": [[i, -4.0] for i in range(21)]}]}),
        json.dumps({"version": 1, "prompts": [{"logprobs": [[1, -0.5]]}]}),
        " " * (1 << 20) + json.dumps({"version": 1, "prompts": [ENTRY]}),
    ],
)
def test_a_damaged_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / GOLDEN_NAME).write_text(content)
    with pytest.raises(ModelFormatError, match=r"golden\.json is damaged"):
        Golden.read(tmp_path)


def test_no_file_is_none_and_a_folder_is_damage(tmp_path: Path) -> None:
    assert Golden.read(tmp_path) is None
    (tmp_path / GOLDEN_NAME).mkdir()
    with pytest.raises(ModelFormatError):
        Golden.read(tmp_path)
