"""Errors of verbs speak of options, and help shows them in sections."""

from __future__ import annotations

import re

import pytest
from edge_llm_cli import console
from edge_llm_cli.wording import for_command_line

from edge_llm.config import load_config
from edge_llm.errors import ContextLengthError, EdgeLLMError, ParameterError, SessionError
from edge_llm.sampling.params import SamplingParams


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
        (ParameterError("--shard must be I/N"), "--shard must be I/N"),
        (SessionError("context must be freed"), "context must be freed"),
    ],
)
def test_settings_have_the_names_of_their_options(error: EdgeLLMError, text: str) -> None:
    assert for_command_line(error)[0].startswith(text)


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
