from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from edge_llm_cli import answer
from edge_llm_cli import run as run_verb
from edge_llm_cli.run import peak_rss_mb

from edge_llm.engine.handle import Handle, Mailbox
from edge_llm.messages import Beam, Choice, Finished, FinishReason, Message, TextDelta, Timings, Usage
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from tests.cli.conftest import ROOT, running, stub_command


def test_the_answer_goes_to_stdout_and_nothing_else(invoke, engine) -> None:
    result = invoke("run", "Hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello.\n", "")
    assert engine.asked[0][0] == [Message.user("Hi")]


def test_an_answer_that_ends_its_line_gets_no_second_end(invoke, engine) -> None:
    engine.pieces = ["a\n"]
    assert invoke("run", "Hi").stdout == "a\n"
    engine.pieces = []
    assert invoke("run", "Hi").stdout == ""


def test_every_option_arrives(invoke, engine) -> None:
    options = {
        "--max-tokens": "9",
        "--temperature": "0.5",
        "--top-k": "4",
        "--top-p": "0.9",
        "--min-p": "0.1",
        "--repetition-penalty": "1.2",
        "--typical-p": "0.8",
        "--top-n-sigma": "1.5",
        "--xtc-probability": "0.25",
        "--xtc-threshold": "0.2",
        "--mirostat-tau": "4",
        "--mirostat-eta": "0.3",
        "--dry-multiplier": "0.75",
        "--dry-base": "1.5",
        "--dry-allowed-length": "3",
        "--dry-penalty-last-n": "500",
        "--seed": "42",
        "--system": "Be brief.",
    }
    breakers = ("--dry-breaker", "\n", "--dry-breaker", "User:")
    flat = [word for pair in options.items() for word in pair]
    stops = ("--stop", "END", "--stop", "\n\n")
    assert invoke("run", "Hi", *flat, *breakers, *stops, "--private", "--cache", "off").exit_code == 0
    messages, params = engine.asked[0]
    assert messages == [Message.system("Be brief."), Message.user("Hi")]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 4, 0.9)
    assert (params.min_p, params.seed, params.stop) == (0.1, 42, ("END", "\n\n"))
    assert params.repetition_penalty == 1.2
    assert (params.typical_p, params.top_n_sigma) == (0.8, 1.5)
    assert (params.xtc_probability, params.xtc_threshold) == (0.25, 0.2)
    assert (params.mirostat_tau, params.mirostat_eta) == (4, 0.3)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.75, 1.5, 3)
    assert (params.dry_penalty_last_n, params.dry_sequence_breakers) == (500, ("\n", "User:"))


def test_options_that_are_not_given_have_their_defaults(invoke, engine) -> None:
    assert invoke("run", "Hi").exit_code == 0
    assert engine.asked[0][1] == SamplingParams(max_tokens=1024)


@pytest.mark.parametrize(
    ("argument", "piped", "prompt"),
    [
        ("Hi", "", "Hi"),
        ("Hi", " \n", "Hi"),
        ("Sum up:", "a\nb\n", "Sum up:\n\na\nb"),
        (None, "just this\r\n", "just this"),
        (None, "h\udcffé", "h\ufffdé"),
        ("bad \udcff byte", "", "bad \ufffd byte"),
        ("", "x", "x"),
    ],
)
def test_piped_text_joins_the_prompt(invoke, engine, argument: str | None, piped: str, prompt: str) -> None:
    result = invoke("run", *([] if argument is None else [argument]), piped=piped.encode("utf-8", "surrogateescape"))
    assert result.exit_code == 0
    assert engine.asked[0][0] == [Message.user(prompt)]


def test_raw_continues_the_text_as_it_is(invoke, engine) -> None:
    assert invoke("run", "--raw", piped="def f():\n").exit_code == 0
    assert engine.asked[0][0] == "def f():\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["  "],
        ["Hi", "--temperature", "-1"],
        ["Hi", "--temperature", "nan"],
        ["Hi", "--top-k", "x"],
        ["Hi", "--top-p", "2"],
        ["Hi", "--max-tokens", "0"],
        ["Hi", "--seed", "-1"],
        ["Hi", "--typical-p", "1.1"],
        ["Hi", "--top-n-sigma", "-1"],
        ["Hi", "--xtc-probability", "2"],
        ["Hi", "--xtc-threshold", "nan"],
        ["Hi", "--mirostat-tau", "-5"],
        ["Hi", "--mirostat-eta", "x"],
        ["Hi", "--dry-multiplier", "inf"],
        ["Hi", "--dry-base", "0.5"],
        ["Hi", "--dry-allowed-length", "0"],
        ["Hi", "--dry-penalty-last-n", "-1"],
        ["Hi", "--dry-breaker", ""],
        ["Hi", "--stop", ""],
        ["Hi", "--raw", "--system", "x"],
        ["Hi", "--json-schema", "/nonexistent"],
        ["Hi", "--grammar", "/dev/null"],
        ["Hi", "--regex", ""],
        ["Hi", "--regex", "a", "--json-schema", "/nonexistent"],
        ["Hi", "--cache", "maybe"],
        ["Hi", "--cache", "on", "--private"],
        ["Hi", "--no-such-option"],
        ["Hi", "there"],
    ],
)
def test_bad_input_is_one_line_and_a_hint(invoke, engine, arguments: list[str]) -> None:
    result = invoke("run", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (lines[1].startswith("hint: ") and len(lines) == 2)
    assert engine.asked == []


def test_the_form_of_the_answer_arrives(invoke, engine, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('\ufeff{"type": "boolean"}', encoding="utf-8")  # as some editors write it
    grammar.write_text('start: "a"')
    for arguments in (["--json-schema", str(schema)], ["--grammar", str(grammar)], ["--regex", "a|b"], []):
        assert invoke("run", "Hi", *arguments).exit_code == 0
    assert [options["response_format"] for options in engine.requested] == [
        Grammar.json_schema('{"type": "boolean"}'),
        Grammar.lark('start: "a"'),
        Grammar.regex("a|b"),
        None,
    ]


def test_choices_arrive(invoke, engine) -> None:
    assert invoke("run", "Hi", "--choices", "yes, no", "--choices", "may be").exit_code == 0
    assert invoke("run", "Hi", "--raw", "--choices", " yes, no").exit_code == 0
    assert invoke("run", "Hi").exit_code == 0
    assert [options["choices"] for options in engine.requested] == [("yes", "no", "may be"), (" yes", " no"), ()]
    result = invoke("run", "Hi", "--choices", "yes,,no")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "one of the choices is empty" in result.stderr


def test_probabilities_of_choices_are_told(invoke, engine) -> None:
    engine.pieces = ["no"]
    engine.choices = (Choice("no", -0.25, 0.75), Choice("yes", -1.5, 0.25))
    result = invoke("run", "Hi", "--choices", "yes,no")
    assert (result.stdout, result.stderr) == ("no\n", "no 0.750, yes 0.250\n")
    told = json.loads(invoke("run", "Hi", "--choices", "yes,no", "--json").stdout)["choices"]
    assert told[1] == {"label": "yes", "logprob": -1.5, "probability": 0.25}


def test_beams_arrive_and_all_that_were_found_are_shown(invoke, engine) -> None:
    engine.pieces = ["no"]
    engine.beams = (Beam("no", (5,), -0.25, -0.125), Beam("not\x1b[2J", (6, 7), -1.5, -0.5))
    result = invoke("run", "Hi", "--beams", "4", "--length-penalty", "2", "--n-best", "2", "--early-stopping")
    assert (result.stdout, result.stderr) == ("no\n\nnot\x1b[2J\n", "scores -0.125, -0.500\n")
    options = {"beams": 4, "length_penalty": 2.0, "n_best": 2, "early_stopping": True}
    assert engine.requested[-1].items() >= options.items()
    assert engine.options.slots == 4
    told = json.loads(invoke("run", "Hi", "--raw", "--beams", "2", "--n-best", "2", "--json").stdout)["beams"]
    assert told[1] == {"text": "not\x1b[2J", "token_ids": [6, 7], "logprob": -1.5, "score": -0.5}
    engine.beams = ()
    assert "beams" not in json.loads(invoke("run", "Hi", "--json").stdout)
    assert engine.options.slots is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--beams", "2", "--temperature", "0.5"], "--beams cannot be combined with --temperature"),
        (["--beams", "2", "--choices", "a,b"], "--beams cannot be combined with --choices"),
        (["--beams", "2000"], "--beams must be a whole number from 1 to 64"),
        (["--n-best", "2"], "--n-best needs --beams"),
        (["--length-penalty", "2"], "--length-penalty needs --beams"),
        (["--early-stopping"], "--early-stopping needs --beams"),
        (["--beams", "2", "--regex", "a"], "--beams cannot be combined with --regex"),
        (["--beams", "2", "--dry-breaker", ":"], "--dry-breaker"),
        (["--choices", "a,b", "--regex", "a"], "--choices and --regex exclude one another"),
        (["--choices", "a,a"], "--choices must differ, and 'a' is given twice"),
        (["--regex", " "], "--regex is empty"),
        (["--stop", "x"] * 17, "--stop must be at most 16 texts, not 17"),
    ],
)
def test_beams_that_cannot_be_are_refused_before_a_model_is_loaded(invoke, engine, options, told) -> None:
    result = invoke("run", "Hi", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert engine.options is None


def test_a_schema_that_is_none_is_refused_before_anything_runs(invoke, engine, tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"$ref": "https://example.org"}'):
        (tmp_path / "schema.json").write_text(text)
        result = invoke("run", "Hi", "--json-schema", str(tmp_path / "schema.json"))
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: --json-schema ")
    (tmp_path / "schema.json").write_bytes(b"\xff\xfe{")
    assert "not UTF-8" in invoke("run", "Hi", "--json-schema", str(tmp_path / "schema.json")).stderr
    assert engine.asked == []


def test_input_without_end_is_cut_off(invoke, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_verb, "MAX_STDIN_BYTES", 1000)
    result = invoke("run", piped="x" * 1001)
    assert result.exit_code == 2
    assert invoke("run", piped="x" * 1000).exit_code == 0


def test_one_json_object(invoke, engine) -> None:
    engine.pieces = ["caf\u00e9 ", "\x1b[31m"]
    result = invoke("run", "Hi", "--json", "--seed", "3")
    assert result.exit_code == 0
    assert result.stdout.isascii()
    value = json.loads(result.stdout)
    assert list(value) == [
        "text",
        "finish_reason",
        "seed",
        "model",
        "usage",
        "forgotten_tokens",
        "timings",
        "reasoning",
        "tool_calls",
    ]
    assert (value["text"], value["finish_reason"], value["seed"], value["model"]) == (
        "café \x1b[31m",
        "stop",
        3,
        "stub",
    )
    rest = {"draft_tokens": 0, "accepted_draft_tokens": 0, "reasoning_tokens": 0}
    assert value["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 2, **rest}
    timings = value["timings"]
    assert list(timings) == [
        "load_s",
        "ttft_s",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "tpot_s",
        "peak_rss_mb",
    ]
    assert timings["load_s"] == 0.25
    assert timings["peak_rss_mb"] > 1


def test_what_fell_out_of_the_context_is_told(invoke, engine) -> None:
    engine.seen = 10
    assert invoke("run", "a" * 10).stderr == ""
    result = invoke("run", "a" * 15, "--context-policy", "slide")
    assert result.stdout == "Hello.\n"
    (line,) = result.stderr.splitlines()
    assert "64 tokens" in line
    assert "5 of the tokens" in line
    assert engine.options.context_policy == "slide"
    result = invoke("run", "a" * 15, "--json")
    assert (json.loads(result.stdout)["forgotten_tokens"], result.stderr) == (5, "")
    assert (engine.options.context_policy, engine.options.usual_policy) == (None, "error")


def test_a_speed_of_few_prompt_tokens_is_not_told(invoke, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub computes 5 prompt tokens: what they take is a step, not reading."""
    told = invoke("run", "Hi", "--stats", "--json")
    assert json.loads(told.stdout)["timings"]["prefill_tokens_per_s"] is None
    assert "prefill" not in told.stderr
    monkeypatch.setattr(run_verb, "_LEAST_PREFILL", 5)
    told = invoke("run", "Hi", "--stats", "--json")
    assert json.loads(told.stdout)["timings"]["prefill_tokens_per_s"] == 1000.0
    assert "prefill 1000 tokens/s" in told.stderr


@pytest.mark.parametrize("arguments", [("run", "Hi"), ("batch", os.devnull, os.devnull)])
def test_json_tells_of_an_interrupt_while_the_model_is_loaded(
    invoke, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(answer, "opened", interrupted)
    told = invoke(*arguments, "--json")
    assert (told.exit_code, told.stderr) == (130, "interrupted\n")
    value = json.loads(told.stdout)
    assert value.get("finish_reason") == "cancelled" or value["complete"] is False
    assert invoke(*arguments).stdout == ""


def test_stats_are_one_line_on_stderr(invoke, engine) -> None:
    result = invoke("run", "Hi", "--stats")
    assert result.stdout == "Hello.\n"
    (line,) = result.stderr.splitlines()
    for word in ("7 prompt tokens (2 cached)", "2 tokens (stop)", "load 0.25 s", "200.0 tokens/s", "seed 5"):
        assert word in line


def test_a_failure_keeps_what_was_said_and_exits_with_1(invoke, engine) -> None:
    engine.fail = "GenerationError"
    result = invoke("run", "Hi")
    assert (result.exit_code, result.stdout) == (1, "Hello.\n")
    assert result.stderr == "error: it went wrong\nhint: do it right\n"
    result = invoke("run", "Hi", "--json")
    assert (result.exit_code, result.stdout) == (1, "")


def test_a_prompt_beyond_the_context_names_both_numbers(invoke, engine) -> None:
    engine.limit = 10
    result = invoke("run", "a" * 11)
    assert result.exit_code == 2
    assert "11" in result.stderr
    assert "10 tokens" in result.stderr
    assert "hint: " in result.stderr


def test_peak_memory_is_that_of_this_process() -> None:
    peak = peak_rss_mb()
    assert peak is not None
    assert 5 < peak < 100_000


def interrupted(spec: dict, *arguments: str) -> tuple[int, str, str]:
    command = stub_command(spec, "run", "Hi", *arguments)
    with running(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # with --json nothing is shown before the end: the stub says when it has said fifty pieces
        first = process.stdout.read(4) if "--json" not in arguments else process.stderr.read(6)[6:]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        return process.returncode, first + out, err


def test_ctrl_c_keeps_what_was_said(own_home: Path) -> None:
    code, out, err = interrupted({"pieces": ["one "], "times": 1000, "delay": 0.02})
    assert code == 130
    assert out.startswith("one ")
    assert out.endswith("\n")
    assert len(out) < 3000
    assert err == "interrupted\n"


@pytest.mark.parametrize("gap", [0.0, 0.01, 0.04, 0.3])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_more_than_one_ctrl_c_is_no_traceback(own_home: Path, gap: float, options: list[str]) -> None:
    """They come while the answer ends, while that is reported, and while Python itself leaves."""
    command = stub_command({"pieces": ["one "], "times": 1000, "delay": 0.02, "announce": 3}, "run", "Hi", *options)
    with running(command) as process:
        assert process.stderr is not None
        assert process.stderr.read(6) == "ready\n"
        for _ in range(8):
            process.send_signal(signal.SIGINT)
            time.sleep(gap)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert out.endswith("\n") or gap > 0.1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("moment", range(12))
def test_a_ctrl_c_while_another_is_being_handled(moment: int) -> None:
    """At every line that the handling of the first one runs, the standard library's too."""
    mailbox, lines = Mailbox(), 0

    def press_again(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == moment + 1:
                signal.raise_signal(signal.SIGINT)
        return press_again

    def cancel() -> None:
        mailbox.put(Finished(FinishReason.CANCELLED, Usage(1, 1), Timings(0.0, None, 0.0), 0))

    def take(_text: str) -> None:
        sys.settrace(press_again)
        signal.raise_signal(signal.SIGINT)
        sys.settrace(None)

    mailbox.put(TextDelta("one"))
    said = answer.read(Handle(mailbox, cancel), take)
    assert said.interrupted
    assert said.text == "one"
    assert lines > moment


def test_ctrl_c_with_json_still_prints_the_object(own_home: Path) -> None:
    spec = {"pieces": ["one "], "times": 1000, "delay": 0.02, "announce": 50}
    code, out, err = interrupted(spec, "--json")
    assert code == 130
    value = json.loads(out)
    assert value["finish_reason"] == "cancelled"
    assert set(value["text"]) <= set("one ")
    assert "Traceback" not in err


def test_a_closed_pipe_ends_quietly(own_home: Path) -> None:
    command = stub_command({"pieces": ["line\n"], "times": 20_000}, "run", "Hi")
    with running(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(20) == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-16"])
def test_any_encoding_of_stdout_will_do(own_home: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    monkeypatch.setenv("PYTHONUTF8", "0")
    command = stub_command({"pieces": ["caf\u00e9 \u540d \U0001f600"]}, "run", "Hi")
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding).startswith("caf")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line_and_a_hint(own_home: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        for arguments in (["run", "Hi"], ["run", "Hi", "--json"], ["models", "list"]):
            command = stub_command({"pieces": ["Hello"]}, *arguments)
            done = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=full, stderr=-1, text=True, check=False
            )
            assert done.returncode == 1
            hint = "hint: free some space there, or write to another disk"
            assert done.stderr.splitlines() == ["error: No space left on device", hint]


def test_closed_standard_streams_do_no_harm(own_home: Path) -> None:
    shell = '"$@" >&- <&- 2>&-; echo $?'
    command = stub_command({"pieces": ["Hello"]}, "run", "Hi")
    done = subprocess.run(["sh", "-c", shell, "sh", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "0\n"


def test_an_open_pipe_that_says_nothing_is_explained(own_home: Path) -> None:
    command = stub_command({"pieces": ["Hello"]}, "run", "Hi")
    with running(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "reading standard input ...\n"
        process.stdin.close()
        assert process.stdout.read() == "Hello\n"


def test_a_prompt_is_not_kept_anywhere(own_home: Path, tmp_path: Path) -> None:
    secret = "xyzzy-private-words"
    command = stub_command({"pieces": ["Hello"]}, "run", secret, "--private", "--stats")
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_the_program_starts_without_heavy_modules() -> None:
    code = "import sys, edge_llm_cli.main; print(*sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    heavy = {"numpy", "numba", "llvmlite", "onnxruntime", "onnx", "tokenizers", "jinja2", "rich", "platformdirs", "pip"}
    assert not heavy & set(loaded.split())
