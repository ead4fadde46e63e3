from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_the_tests_are_llama_benchs(invoke, tiny_folder: Path, kernels: object, monkeypatch, home: Path) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(home))
    arguments = ("bench", str(tiny_folder), "-p", "16,8", "-n", "4", "-d", "32,0", "-r", "3", "-t", "1")
    value = json.loads(invoke(*arguments, "--json").stdout)
    assert [result["test"] for result in value["results"]] == [
        "pp16",
        "pp8",
        "tg4",
        "pp16 @ d32",
        "pp8 @ d32",
        "tg4 @ d32",
    ]
    assert (value["threads"], value["kv_type"], value["repetitions"]) == (1, "int8", 3)
    for result in value["results"]:
        assert (result["n_prompt"] == 0) != (result["n_gen"] == 0)
        assert len(result["samples_ts"]) == 3
        assert min(result["samples_ts"]) <= result["avg_ts"] <= max(result["samples_ts"])
        assert result["stddev_ts"] >= 0
    table = invoke(*arguments).stdout.splitlines()
    assert table[0].split() == ["model", "threads", "kv_type", "test", "tokens/s"]
    assert len(table) == 7
    assert " ± " in table[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "many"), "-p takes whole numbers from 0 to 16777216, not 'many'"),
        (("-n", "-1"), "-n takes whole numbers"),
        (("-d", "1,,2"), "-d takes whole numbers"),
        (("-r", "0"), "-r takes whole numbers from 1 to 1000, not '0'"),
        (("-p", "0", "-n", "0"), "there is nothing to measure"),
        (("-p", "500", "-d", "13"), "a context of 513 tokens is more than the 512"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    invoke, tiny_folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = invoke("bench", str(tiny_folder), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
