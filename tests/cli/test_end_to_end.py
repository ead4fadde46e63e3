"""The program as its users start it, on a tiny model with random weights: real import, kernels, engine and signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from edge_llm.install.store import ModelStore
from tests.cli.conftest import ROOT, running

PROGRAM = [sys.executable, "-c", "from edge_llm_cli.main import run; run()"]


@pytest.fixture(autouse=True)
def own_home(home: Path, kernels: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own that has the compiled kernels already, and in which somebody was told of the prefix cache."""
    own = tmp_path / "home"
    shutil.copytree(home / "cache", own / "cache")
    (own / "cache" / "prefixes").mkdir(exist_ok=True)
    for folder in (own / "cache", *(own / "cache").iterdir()):
        folder.chmod(0o700)
    monkeypatch.setenv("EDGE_LLM_HOME", str(own))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'apps'}{os.pathsep}{ROOT}")
    return own


def program(*arguments: str, prefix: tuple[str, ...] = (), **options) -> subprocess.CompletedProcess:
    options = {"stdin": subprocess.DEVNULL, **options} if "input" not in options else options
    return subprocess.run(
        [*prefix, *PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, **options
    )


def test_a_gguf_file_answers_and_is_imported_once(tiny_gguf: Path, own_home: Path) -> None:
    first = program("run", "Hi", "-m", str(tiny_gguf), "--max-tokens", "8", "--seed", "1", "--json")
    assert (first.returncode, first.stderr) == (0, "importing weights ...\n")
    value = json.loads(first.stdout)
    assert value["finish_reason"] in ("stop", "length")
    assert value["usage"]["prompt_tokens"] > 0
    assert value["seed"] == 1
    second = program("run", "Hi", "-m", str(tiny_gguf), "--max-tokens", "8", "--seed", "1", "--json")
    assert (second.returncode, second.stderr) == (0, "")
    again = json.loads(second.stdout)
    assert again["text"] == value["text"]
    assert again["usage"]["cached_tokens"] > value["usage"]["cached_tokens"] == 0
    assert ModelStore().names() == [value["model"]]
    by_name = program("run", "Hi", "-m", value["model"], "--max-tokens", "8", "--seed", "1")
    assert by_name.stdout.rstrip("\n") == value["text"].rstrip("\n")


def test_doctor_tells_whether_a_model_still_says_what_it_said(tiny_gguf: Path, own_home: Path) -> None:
    def found() -> tuple[int, dict[str, object]]:
        result = program("doctor", "--quality", "--json")
        value = json.loads(result.stdout)
        assert value["problems"] == {} or list(value["problems"]) == ["quality tiny"]
        return result.returncode, value["quality"]["tiny"]

    assert program("import", str(tiny_gguf), "--name", "tiny").returncode == 0
    assert found() == (0, {"state": "as imported", "kl": 0.0, "worst_kl": 0.0})
    file = own_home / "data" / "models" / "tiny" / "golden.json"
    said = json.loads(file.read_text())
    for prompt in said["prompts"]:
        prompt["logprobs"] = [[token_id, 100 * logprob] for token_id, logprob in prompt["logprobs"]]
    file.write_text(json.dumps(said))
    code, facts = found()
    assert code == 1
    assert str(facts["state"]).startswith("says something else than at import: KL ")
    file.write_text("{")
    assert found() == (1, {"state": "golden.json is damaged"})
    file.unlink()
    assert found() == (0, {"state": "imported before this was stored: import it again"})


def test_no_network_is_needed_or_touched(tiny_folder: Path) -> None:
    alone = ("unshare", "--map-root-user", "--net")
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode != 0:
        pytest.skip("no network namespaces here")
    result = program("run", "Hi", "-m", str(tiny_folder), "--max-tokens", "4", "--json", prefix=alone)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["usage"]["completion_tokens"] >= 1


def test_a_context_that_is_too_small_names_both_numbers(tiny_folder: Path) -> None:
    result = program("run", "-m", str(tiny_folder), "--context", "16", "--raw", input="word " * 200)
    assert result.returncode == 2
    assert "16 tokens" in result.stderr
    assert result.stdout == ""


@pytest.mark.real_model
def test_the_real_model_answers(smollm2_folder: Path) -> None:
    question = ("run", "What is the capital of France?", "--system", "Answer in English.", "--temperature", "0")
    result = program(*question, "-m", str(smollm2_folder), "--stats")
    assert result.returncode == 0
    assert "Paris" in result.stdout
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.real_model
def test_a_base_model_continues_and_does_not_chat(gemma3_folder: Path) -> None:
    command = (
        "run",
        "Monday, Tuesday, Wednesday,",
        "-m",
        str(gemma3_folder),
        "--temperature",
        "0",
        "--max-tokens",
        "8",
    )
    result = program(*command, "--raw")
    assert result.returncode == 0
    assert result.stdout.startswith(" Thursday, Friday, Saturday, Sunday")
    refused = program(*command)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "has no chat template" in refused.stderr
    assert "--raw" in refused.stderr


@pytest.mark.real_model
def test_ctrl_c_stops_the_real_model_and_keeps_what_was_said(smollm2_folder: Path) -> None:
    command = [*PROGRAM, "run", "Count from one to one thousand in words.", "-m", str(smollm2_folder)]
    with running(command) as process:
        assert process.stdout is not None
        first = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert first
    assert rest.endswith("\n")


def test_more_threads_than_cpus_are_no_fault(tiny_folder: Path) -> None:
    result = program(
        "run", "Hi", "-m", str(tiny_folder), "--max-tokens", "2", "--temperature", "0", "--threads", "64", "--stats"
    )
    assert result.returncode == 0
    cut, stats = result.stderr.splitlines()
    assert cut == "the answer was cut: it reached --max-tokens 2"
    assert "2 tokens (length)" in stats


def test_a_truncated_gguf_is_one_line_and_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    data = tiny_gguf.read_bytes()
    for length in (0, 3, 4, 24, len(data) // 3, len(data) - 1):
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:length])
        result = program("run", "Hi", "-m", str(path))
        assert result.returncode == 2, length
        lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
        assert lines[0].startswith("error: ")
        assert len(lines) <= 2
    assert not ModelStore().names()
    assert not list(ModelStore().root.glob(".*"))


@pytest.mark.parametrize("private", ["--private", "--cache off", "EDGE_LLM_PRIVATE", "config"])
def test_a_prompt_is_stored_nowhere(
    tiny_folder: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, private: str
) -> None:
    """B60: neither its text nor, as blocks hold them, its tokens."""
    secret = "xyzzy-private-words"
    if private == "config":
        (own_home / "config").mkdir()
        (own_home / "config" / "config.toml").write_text("[privacy]\nprivate = true\n", "utf-8")
    elif not private.startswith("--"):
        monkeypatch.setenv(private, "1")
    options = private.split() if private.startswith("--") else []
    before = {path for path in own_home.rglob("*") if path.is_file()}
    assert program("run", secret, "-m", str(tiny_folder), "--max-tokens", "4", *options).returncode == 0
    after = {path for path in own_home.rglob("*") if path.is_file()}
    assert {path.parent.name for path in after - before} <= {"digests"}, "those of the model's own files"
    assert before <= after
    assert not [path for path in after if secret.encode() in path.read_bytes()]


def test_the_first_use_says_what_is_kept_where(tiny_folder: Path, own_home: Path) -> None:
    """B24 from the command line: the next process finds the prompt, and whoever clears the folder is not told again."""
    folder = own_home / "cache" / "prefixes"
    folder.rmdir()
    ask = ("run", "word " * 100, "-m", str(tiny_folder), "--max-tokens", "4", "--temperature", "0", "--json")
    first, second = program(*ask), program(*ask)
    assert first.stderr == f"what the model reads is kept in {folder}; --cache off or --private keeps nothing\n"
    assert second.stderr == ""
    before, after = json.loads(first.stdout), json.loads(second.stdout)
    assert after["text"] == before["text"]
    assert after["usage"]["cached_tokens"] == after["usage"]["prompt_tokens"] - 1
    stats = json.loads(program("cache", "stats", "--json").stdout)
    assert (stats["folder"], stats["files"] > 1, stats["on"]) == (str(folder), True, True)
    assert json.loads(program("cache", "verify", "--json").stdout)["damaged"] == 0
    assert program("cache", "clear").returncode == 2
    assert json.loads(program("cache", "clear", "--yes", "--json").stdout)["files"] == stats["files"]
    assert json.loads(program("cache", "stats", "--json").stdout)["files"] == 0
    third = program(*ask)
    assert (json.loads(third.stdout)["usage"]["cached_tokens"], third.stderr) == (0, "")


def test_a_chat_with_a_real_model(tiny_folder: Path) -> None:
    result = program("chat", "--plain", "-m", str(tiny_folder), "--max-tokens", "4", input="Hi\nAgain\n/exit\n")
    assert result.returncode == 0
    assert "Traceback" not in result.stderr


def test_eval(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 10, "utf-8")
    result = program("eval", str(tiny_folder), "--text", str(text), "--reference", "f32", "--window", "64", "--json")
    assert result.returncode == 0
    value = json.loads(result.stdout)
    assert list(value) == ["perplexity", "tokens", "window", "reference_perplexity", "kl", "top1_agreement"]
    assert 0 <= value["kl"] < 0.1
    assert program("eval", str(tiny_folder), "--text", str(text), "--window", "1").returncode == 2
    assert program("eval", str(tiny_folder), "--text", str(text), "--reference", "f16").returncode == 2


def test_eval_that_is_told_to_end_leaves_nothing_behind(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    text, scratch = tmp_path / "text.txt", tmp_path / "scratch"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 50_000, "utf-8")
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    command = [*PROGRAM, "eval", str(tiny_folder), "--text", str(text), "--reference", "f32", "--window", "64"]
    with running(command) as process:
        while not list(scratch.glob("edge-llm-reference-*/*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not list(scratch.iterdir())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become nobody in particular")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """B30: no HOME, and a number that no user has."""
    nobody = ("setpriv", "--reuid", "54321", "--clear-groups")
    if subprocess.run(
        [*nobody, sys.executable, "-c", "import edge_llm_cli"], check=False, capture_output=True
    ).returncode:
        pytest.skip("other users cannot read this Python")
    monkeypatch.delenv("EDGE_LLM_HOME")
    monkeypatch.delenv("HOME", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setenv("TMPDIR", folder)
        result = program("doctor", "--json", prefix=nobody)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["folders"]["data"].startswith(f"{folder}/edge-llm-54321/data")
