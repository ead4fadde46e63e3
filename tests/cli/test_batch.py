"""`edge-llm batch`: what is told, what goes on where it was, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from edge_llm_cli import answer
from edge_llm_cli.answer import EngineOptions
from edge_llm_cli.batch_report import BatchReport

from edge_llm.engine.engine import Engine
from tests.batch.rig import Kept, chat, completion, engine_of, jsonl
from tests.cli.conftest import ROOT
from tests.engine.fakes import make_core
from tools.trust.batch_child import opener

LINES = [chat("a", model="fake"), "{", completion("b"), chat("c", "x" * 5000), completion("d")]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineOptions]:
    """The fake model takes the place of every model; what each engine was opened with."""
    asked: list[EngineOptions] = []

    @contextlib.contextmanager
    def opened(model: str, options: EngineOptions) -> Iterator[tuple[Engine, float]]:
        asked.append(options)
        with engine_of(make_core(kv_type=options.kv_type)) as engine:
            yield engine, 0.0

    monkeypatch.setattr(answer, "opened", opened)
    return asked


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(LINES))
    return source, target


def results(target: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, target.read_text("ascii").splitlines()), key=lambda line: line["id"])


def test_each_line_has_its_answer_and_errors_are_code_1(invoke, opened, files) -> None:
    source, target = files
    result = invoke("batch", str(source), str(target), "-m", "fake")
    assert (result.exit_code, result.stdout) == (1, "")
    assert [line["custom_id"] for line in results(target)] == ["a", None, "b", "c", "d"]
    line, why = result.stderr.splitlines()
    assert line.startswith("3 answered, 2 errors; 18 tokens in 0:0")
    assert why == "exit code 1: 2 lines of the output hold errors"
    source.write_bytes(jsonl([chat("a")]))
    assert invoke("batch", str(source), str(target.with_name("other"))).exit_code == 0


def test_a_second_run_repeats_nothing(invoke, opened, files) -> None:
    source, target = files
    invoke("batch", str(source), str(target), "--max-tokens", "5")
    before = target.read_bytes()
    again = invoke("batch", str(source), str(target), "--max-tokens", "5", "--json")
    assert again.exit_code == 1, "what failed then is still no answer"
    value = json.loads(again.stdout)
    assert (value["complete"], value["lines"], value["done_before"], value["answered"]) == (True, 5, 5, 0)
    assert target.read_bytes() == before
    with target.open("r+b") as file:
        file.truncate(len(before) - 5)
    source.write_bytes(source.read_bytes() + jsonl([chat("e")]))  # an input may grow
    grown = invoke("batch", str(source), str(target), "--max-tokens", "5", "--json")
    assert json.loads(grown.stdout)["answered"] + json.loads(grown.stdout)["errors"] == 2
    assert [line["custom_id"] for line in results(target)] == ["a", None, "b", "c", "d", "e"]


@pytest.mark.parametrize("options", [("--max-tokens", "6"), ("--any-model",), ("--context-policy", "slide")])
def test_answers_of_other_options_are_not_gone_on_with(invoke, opened, files, options: tuple[str, ...]) -> None:
    source, target = files
    invoke("batch", str(source), str(target))
    before = target.read_bytes()
    result = invoke("batch", str(source), str(target), *options)
    assert result.exit_code == 2
    assert "another input, or of another model or other options" in result.stderr
    source.write_bytes(jsonl(LINES[1:]))
    assert invoke("batch", str(source), str(target)).exit_code == 2
    assert target.read_bytes() == before


@pytest.mark.parametrize("other", [{"layout": "static"}, {"provider": "openvino"}])
def test_answers_that_something_else_computed_are_not_gone_on_with(invoke, opened, files, monkeypatch, other) -> None:
    source, target = files
    invoke("batch", str(source), str(target))
    load = answer.opened

    @contextlib.contextmanager
    def opened_otherwise(model: str, options: EngineOptions) -> Iterator[tuple[Engine, float]]:
        with load(model, options) as (engine, seconds):
            engine.info = dataclasses.replace(engine.info, **other)
            yield engine, seconds

    monkeypatch.setattr(answer, "opened", opened_otherwise)
    assert invoke("batch", str(source), str(target)).exit_code == 2


def test_a_finished_batch_says_why_it_still_fails(invoke, opened, files) -> None:
    source, target = files
    source.write_bytes(jsonl([chat("a"), "{"]))
    first = invoke("batch", str(source), str(target))
    assert first.stderr.startswith("1 answered, 1 error; ")
    assert first.stderr.endswith("\nexit code 1: 1 line of the output holds an error\n")
    again = invoke("batch", str(source), str(target))
    assert again.exit_code == 1
    assert again.stderr.splitlines() == [
        "nothing is left to do: 2 lines were done before",
        "exit code 1: 1 line of the output holds an error (from before): what is deleted there is asked again",
    ]
    source.write_bytes(source.read_bytes() + jsonl(["["]))
    grown = invoke("batch", str(source), str(target), "--json")
    assert (json.loads(grown.stdout)["errors"], json.loads(grown.stdout)["errors_before"]) == (1, 1)


def test_one_file_cannot_be_both_ends(invoke, opened, files, tmp_path: Path) -> None:
    source, _ = files
    before = source.read_bytes()
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link"):
        result = invoke("batch", str(source), str(target))
        assert result.exit_code == 2
        assert "cannot be both the input and the output" in result.stderr
        assert "hint: give the answers a file of their own" in result.stderr
    assert source.read_bytes() == before
    assert opened == []


def test_one_file_cannot_be_both_streams(files) -> None:
    source, _ = files
    before = source.read_bytes()
    with source.open("rb") as stdin, source.open("ab") as stdout:
        command = [sys.executable, "-c", "from edge_llm_cli.entry import run; run()", "batch", "-", "-"]
        result = subprocess.run(command, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: standard input cannot be both")
    assert source.read_bytes() == before


def test_failed_lines_that_are_taken_out_are_tried_again(invoke, opened, files) -> None:
    source, target = files
    invoke("batch", str(source), str(target))
    good = [line for line in target.read_text().splitlines(True) if '"status_code": 200' in line]
    target.write_text("".join(good))
    result = invoke("batch", str(source), str(target), "--json")
    assert json.loads(result.stdout)["errors"] == 2
    assert target.read_text().startswith("".join(good))


def test_shards_together_are_the_whole(invoke, opened, files, tmp_path: Path) -> None:
    source, whole = files
    invoke("batch", str(source), str(whole))
    parts = [tmp_path / f"part{i}" for i in (1, 2)]
    for i, part in enumerate(parts, 1):
        invoke("batch", str(source), str(part), "--shard", f"{i}/2")
    joined = tmp_path / "joined"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert [line["id"] for line in results(joined)] == [line["id"] for line in results(whole)]
    again = invoke("batch", str(source), str(joined), "--json")
    assert json.loads(again.stdout)["done_before"] == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ["none.jsonl", "out.jsonl"],
        ["in.jsonl", "none/out.jsonl"],
        [".", "out.jsonl"],
        ["in.jsonl", "."],
        ["in.jsonl", "in.jsonl"],
        ["in.jsonl", "out.jsonl", "--shard", "3/2"],
        ["in.jsonl", "out.jsonl", "--max-tokens", "0"],
        ["in.jsonl", "out.jsonl", "--cache", "maybe"],
        ["in.jsonl", "-", "--json"],
        ["in.jsonl"],
    ],
)
def test_bad_input_is_said_before_a_model_is_loaded(invoke, opened, files, monkeypatch, arguments: list[str]) -> None:
    monkeypatch.chdir(files[0].parent)
    result = invoke("batch", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) <= 2
    assert not opened


def test_options_reach_the_engine_and_nothing_is_kept_on_disk_unless_asked(invoke, opened, files) -> None:
    source, _ = files
    more = ("--slots", "3", "--context", "99", "--threads", "2", "--kv-dtype", "f32", "--context-policy", "slide")
    for extra in ((), ("--cache", "on"), ("--private",), more):
        invoke("batch", str(source), os.devnull, *extra)
    plain, cached, private, rich = opened
    assert (plain.usual_cache, plain.prefix_cache, plain.private) == ("memory", None, False)
    assert (cached.prefix_cache, private.private) == ("disk", True)
    assert (rich.slots, rich.context, rich.threads, rich.kv_type, rich.context_policy) == (3, 99, 2, "f32", "slide")


def child(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tools.trust.batch_child", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "apps"), str(ROOT)])}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=-1, **options)


def test_from_a_pipe_to_a_pipe(files) -> None:
    """The answer to a line comes while the pipe stays open."""
    with child("0", "-", "-", stdin=-1) as process:
        process.stdin.write(jsonl([chat("a")]))
        process.stdin.flush()
        first = json.loads(process.stdout.readline())
        rest, stderr = process.communicate(jsonl(["{"]), timeout=60)
    assert (first["custom_id"], json.loads(rest)["error"]["code"]) == ("a", "invalid_json_line")
    assert (process.returncode, len(stderr.splitlines())) == (1, 2)


def test_ctrl_c_while_a_pipe_is_silent(files) -> None:
    _, target = files
    with child("0", "-", str(target), stdin=-1) as process:
        process.stdin.write(jsonl([chat("a")]))
        process.stdin.flush()
        until = time.monotonic() + 30
        while not (target.exists() and target.stat().st_size) and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read().splitlines()[-1] == b"interrupted"
    assert len(results(target)) == 1


def test_ctrl_c_leaves_what_can_be_gone_on_with(files) -> None:
    source, target = files
    source.write_bytes(jsonl(completion(f"r{i}", f"{i}", max_tokens=20) for i in range(400)))
    with child("0.002", str(source), str(target), "--json") as process:
        until = time.monotonic() + 30
        while not (target.exists() and target.stat().st_size) and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"interrupted\n")
    value = json.loads(stdout)
    assert (value["complete"], value["lines"]) == (False, 400)
    assert 0 < value["answered"] == len(results(target)) < 400
    with child("0", str(source), str(target), "--json") as process:
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(stdout)["done_before"] == value["answered"]
    assert len({line["custom_id"] for line in results(target)}) == len(results(target)) == 400


def test_a_reader_that_has_seen_enough_ends_it(files) -> None:
    source, _ = files
    source.write_bytes(jsonl(completion(f"r{i}", f"{i}") for i in range(300)))
    with child("0.001", str(source), "-") as process:
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(60) == 0
    assert b"Traceback" not in stderr


def test_a_bar_says_how_fast_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_llm_batch.lines import Survey
    from edge_llm_batch.run import Tally

    said: list[tuple[object, ...]] = []
    now = 100.0
    report = BatchReport(Kept(), clock=lambda: now)
    report.begin(Survey(30, 10), "fake")
    monkeypatch.setattr(report, "_display", lambda *told: said.append(told))
    now = 110.0
    report.show(Tally(answered=4, errors=1, completion_tokens=500))
    assert said.pop() == ("answering", 15, 30, "15 of 30, 50 tokens/s, 0:30 left")
    unknown = BatchReport(Kept(), clock=lambda: now)
    unknown.begin(None, "fake")
    monkeypatch.setattr(unknown, "_display", lambda *told: said.append(told))
    now = 111.0
    unknown.show(Tally(answered=4, completion_tokens=30))
    assert said.pop() == ("answering", 0, 0, "4 lines, 30 tokens/s")


def test_opener_gives_an_engine_like_the_real_one() -> None:
    with opener(0.0)("fake", EngineOptions()) as (engine, seconds):
        assert (engine.info.name, seconds) == ("fake", 0.0)
