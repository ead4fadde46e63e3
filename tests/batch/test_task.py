"""Tasks: what a line asks for, and every way in which it may not be one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_llm_batch import lines as batch_lines

from tests.batch.rig import CHAT, chat, completion, tasks_of


def without(line: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != name}


FAULTS = [
    ("{not json", "invalid_json_line"),
    ('{"custom_id": "a", "custom_id": "b"}', "invalid_json_line"),
    (b'{"custom_id": "\xff"}', "invalid_json_line"),
    ('{"custom_id": "\\ud800"}', "invalid_json_line"),
    ("[]", "invalid_json_line"),
    ("[" * 100_000, "invalid_json_line"),
    ('{"custom_id": NaN}', "invalid_json_line"),
    (without(chat("a"), "custom_id"), "missing_required_parameter"),
    ({**chat("a"), "custom_id": 5}, "invalid_custom_id"),
    (chat(""), "invalid_custom_id"),
    (chat("a" * 513), "invalid_custom_id"),
    (without(chat("a"), "method"), "missing_required_parameter"),
    ({**chat("a"), "method": "GET"}, "invalid_method"),
    (without(chat("a"), "url"), "missing_required_parameter"),
    ({**chat("a"), "url": "/v1/nothing"}, "invalid_url"),
    ({**chat("a"), "url": ["/v1/completions"]}, "invalid_url"),
    ({**chat("a"), "url": "\x1b[2J"}, "invalid_url"),
    (without(chat("a"), "body"), "missing_required_parameter"),
    ({**chat("a"), "body": [1]}, "invalid_body"),
]


@pytest.mark.parametrize(("line", "code"), FAULTS)
def test_what_is_wrong_with_a_line_is_said(line: object, code: str) -> None:
    (task,) = tasks_of([line])
    assert task.fault is not None
    assert task.fault.code == code
    assert task.fault.message.isprintable()
    assert len(task.fault.message) < 200


def test_a_fault_keeps_the_custom_id_that_it_has() -> None:
    assert [task.custom_id for task in tasks_of([{**chat("a"), "method": "GET"}, "{"])] == ["a", None]


def test_a_request_is_what_the_line_says() -> None:
    (task,) = tasks_of([{**chat("ä\n"), "more": 1}])
    assert (task.custom_id, task.url, task.fault) == ("ä\n", CHAT, None)
    assert task.body == chat("ä\n")["body"]


def test_of_lines_with_one_custom_id_the_first_counts() -> None:
    tasks = list(tasks_of([{**chat("a"), "method": "GET"}, chat("b"), chat("a"), chat("b")]))
    assert [task.fault and task.fault.code for task in tasks] == [
        "invalid_method",
        None,
        "duplicate_custom_id",
        "duplicate_custom_id",
    ]
    assert [task.custom_id for task in tasks] == ["a", "b", None, None]


def test_a_line_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 100)
    long, short = tasks_of([chat("a", "x" * 100), "{}"])
    assert long.fault is not None
    assert long.fault.code == "line_too_long"
    assert short.fault is not None
    assert short.fault.code == "missing_required_parameter"


def test_keys_of_prompts_that_begin_alike_stand_together() -> None:
    system = {"role": "system", "content": "You sort things. " * 20}

    def asking(text: str, first: dict[str, str]) -> dict[str, Any]:
        return chat(text, messages=[first, {"role": "user", "content": text}])

    others = {"role": "system", "content": "You count things."}
    lines = [asking("a", system), asking("b", others), asking("c", system), completion("d", "a"), asking("e", others)]
    ordered = sorted(tasks_of(lines), key=lambda task: task.key)
    names = "".join(task.custom_id or "" for task in ordered)
    assert "ac" in names
    assert "be" in names
    (huge,) = tasks_of([chat("a", "y" * 10**6)])
    assert len(json.dumps(huge.key)) < 10_000
