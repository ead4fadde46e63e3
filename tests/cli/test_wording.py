"""Errors of verbs speak of options, and help shows them in sections."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
from edge_llm_batch.lines import Shard
from edge_llm_cli import console
from edge_llm_cli.wording import for_command_line, system_error

from edge_llm.config import load_config
from edge_llm.engine.request import Request
from edge_llm.errors import ContextLengthError, EdgeLLMError, ParameterError, SessionError
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams

PROGRAM = (sys.executable, "-c", "from edge_llm_cli.entry import run; run()")


def raised(work, *arguments, **values) -> EdgeLLMError:
    with pytest.raises(EdgeLLMError) as caught:
        work(*arguments, **values)
    return caught.value


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (raised(load_config, kv_type="f16"), "--kv-dtype must be int8 or f32, not 'f16'"),
        (raised(load_config, context=0), "--context must be between 1 and 16777216, not 0"),
        (raised(load_config, speculation="x"), "--speculate must be off, lookup or draft:MODEL, not 'x'"),
        (raised(SamplingParams, top_k=-1), "--top-k must be between 0 and "),
        (raised(SamplingParams, dry_sequence_breakers=("",)), "each text of --dry-breaker must have 1 to "),
        (ParameterError("kv_type in /etc/config.toml must be int8 or f32"), "kv_type in /etc/config.toml must"),
        (raised(Shard.parse, "3/2"), "--shard must be I/N with I from 1 to N"),
        (raised(load_config, provider="cuda"), "--provider must be auto, cpu, openvino or qnn, not 'cuda'"),
        (raised(Grammar.regex, "a\\"), "--regex is not sound: it ends after a backslash"),
        (raised(Grammar.lark, ""), "--grammar is empty"),
        (raised(Grammar.json_schema, "{"), "--json-schema is no JSON"),
        (raised(Request.completion, "x", choices=("a", "tools needs", "a")), "--choices must differ, and 'a' is given"),
        (raised(Request.completion, "x", beams=2, choices=("a",)), "--beams cannot be combined with --choices"),
        (ParameterError("the prompt needs more"), "the prompt needs more"),
        (SessionError("context must be freed"), "context must be freed"),
    ],
)
def test_settings_have_the_names_of_their_options(error: EdgeLLMError, text: str) -> None:
    assert for_command_line(error)[0].startswith(text)


def test_a_hint_names_the_option_and_its_value() -> None:
    error = ParameterError("tools and regex exclude one another", hint='or with tool_choice "none"')
    assert for_command_line(error) == ("--tool and --regex exclude one another", "or with --tool-choice none")


@pytest.mark.parametrize("arguments", [["rum"], ["models", "lst"], ["run", "--tempature", "1"]])
def test_what_was_meant_is_said_once(arguments: list[str]) -> None:
    result = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.lower().count("did you mean") == 1
    assert result.stderr.splitlines()[1].startswith("hint: edge-llm")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_what_the_system_refuses_has_a_hint() -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run([*PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.stderr.splitlines()[1].startswith("hint: free some space")
    assert "rights" in str(system_error(PermissionError(errno.EACCES, "Permission denied", "/x")).hint)
    assert str(system_error(PermissionError(errno.EACCES, "Permission denied", "/x"))) == "Permission denied: /x"
    assert system_error(OSError("odd")).hint is None


@pytest.mark.parametrize("verb", ["run", "batch", "import", "pull", "eval", "bench", "models show", "models rm"])
def test_every_argument_is_described(invoke, verb: str) -> None:
    shown = invoke(*verb.split(), "--help").stdout.partition("\nArguments:\n")[2].partition("\n\n")[0]
    arguments = re.findall(r"^  (\S+) +(\S.*)$", shown, re.MULTILINE)
    assert arguments
    assert all(not said.startswith("[") for _, said in arguments), shown


def test_options_of_eval_say_what_they_take(invoke) -> None:
    shown = invoke("eval", "--help").stdout
    assert {"--text FILE", "--reference f32", "--kv-dtype int8|f32"} <= set(re.findall(r"--[\w-]+ \S+", shown))


def test_a_prompt_that_is_too_long_names_the_option() -> None:
    text, hint = for_command_line(ContextLengthError(900, 512))
    assert hint is not None
    assert hint.endswith("(--context-policy slide)")
    assert "900" in text


@pytest.mark.parametrize("verb", ["run", "chat", "serve", "batch"])
def test_options_stand_in_sections(invoke, verb: str) -> None:
    shown = invoke(verb, "--help").stdout
    titles = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert titles[-2:] == ["Engine", "What is kept"]
    assert "Options" in titles
    engine = shown.split("\nEngine:\n")[1].split("\n\n")[0]
    assert "--threads" in engine
    assert "--kv-dtype int8|f32" in engine
    assert "--cache on|off" in shown.split("\nWhat is kept:\n")[1]
    assert shown.count("--help") == 1
    assert "\x1b" not in shown


def test_every_option_of_run_is_shown_once(invoke) -> None:
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", invoke("run", "--help").stdout, re.MULTILINE)
    assert len(options) == len(set(options)) > 30
    assert {"--temperature", "--xtc-threshold", "--json-schema", "--tool", "--private", "--help"} <= set(options)


def test_one_block_is_one_block(invoke, own_home) -> None:
    folder = own_home / "cache" / "prefixes"
    folder.mkdir(parents=True, mode=0o700)
    assert invoke("cache", "clear", "--yes").stdout == "0 blocks are deleted, 0.0 MB are free again\n"
    assert console.counted(1, "block is deleted", "blocks are deleted") == "1 block is deleted"
    assert console.counted(2, "block", "blocks") == "2 blocks"


def test_no_sentence_of_the_list_of_verbs_is_cut(invoke) -> None:
    verbs = invoke("--help").stdout.partition("Commands:")[2].splitlines()[1:]
    assert len(verbs) > 8
    assert all(line.endswith(".") and not line.endswith("...") for line in verbs)
