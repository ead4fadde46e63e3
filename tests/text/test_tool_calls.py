"""Calls are read whole or stay text, however the answer is cut into chunks; B46: arguments are always a JSON object."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.messages import TextDelta, ToolCallDelta
from edge_llm.text.bracketed import MAX_CALL_CHARACTERS
from edge_llm.text.tool_calls import MAX_CALLS, ToolCallParser, canonical_arguments, new_call_id
from edge_llm.text.tool_syntax import GENERIC, CallForm, ToolSyntax
from tests.text.chunks import chunked, cut_anywhere, operations, read

MISTRAL = ToolSyntax(CallForm.JSON, "[TOOL_CALLS]", "")
LLAMA = ToolSyntax(CallForm.JSON, "", "", "parameters")
LFM = ToolSyntax(CallForm.PYTHONIC, "<|tool_call_start|>", "<|tool_call_end|>")
BARE_PYTHONIC = ToolSyntax(CallForm.PYTHONIC, "", "")
SYNTAXES = {"hermes": GENERIC, "mistral": MISTRAL, "llama": LLAMA, "lfm": LFM, "pythonic": BARE_PYTHONIC}
NAMES = ("f", "weather", "say")

PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call_start|>", "<|tool_call_end|>", "<tool", "_call>",
    '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "}</tool_call>"}}', "[f(a='x]', b=[1, -2.5])]",
    '{"name": "g"}', '{"name": "f", "arguments": ', '"\\', '"', "'", "{", "}", "[", "]", "(", ")", ";", ",", " ", "\n",
    "text", "é",
]  # fmt: skip


def parser(syntax: ToolSyntax) -> ToolCallParser:
    ids = itertools.count()
    return ToolCallParser(syntax, NAMES, lambda: f"id{next(ids)}")


def parse(text: str, syntax: ToolSyntax = GENERIC) -> tuple[str, list[tuple[str, Any]], int]:
    """(shown text, (name, arguments) of the calls, how many were invalid), fed character by character."""
    reading = parser(syntax)
    events = read(reading, text)
    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    told = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [(d.id, d.name, d.arguments) for d in told] == [(c.id, c.name, c.arguments) for c in reading.calls]
    assert [delta.index for delta in told] == list(range(len(told)))
    return shown, [(call.name, json.loads(call.arguments)) for call in reading.calls], reading.invalid


@pytest.mark.parametrize(
    ("syntax", "text", "shown", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
        (
            "hermes",
            'Wait.\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "say", "arguments": null}</tool_call>\n',
            "Wait.",
            [("f", {}), ("say", {})],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} bye ', "bye ", [("f", {})]),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "say"}]</tool_call>', "", [("f", {}), ("say", {})]),
        (
            "hermes",
            '<tool_call>{"arguments": {"a": "</tool_call> {\\""}, "name": "f"}</tool_call>',
            "",
            [("f", {"a": '</tool_call> {"'})],
        ),
        ("hermes", "a < b, <tool call>, \n", "a < b, <tool call>, \n", []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}, "id": "123456789"}]', "", [("f", {"a": [1]})]),
        ("llama", '{"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
        ("llama", ' {"name": "f", "parameters": {}}; {"name": "say", "parameters": {}}', "", [("f", {}), ("say", {})]),
        ("llama", '{"city": "Paris"} ', '{"city": "Paris"} ', []),
        ("llama", "Hello {}", "Hello {}", []),
        ("llama", "[see](x) {", "[see](x) {", []),
        ("lfm", "<|tool_call_start|>[f(a='x', b=[1, {'c': None}]), say()]<|tool_call_end|>Done.", "Done.",
         [("f", {"a": "x", "b": [1, {"c": None}]}), ("say", {})]),
        ("pythonic", '[weather(city="a]b\\n", far=True, t=-1.5e3)]', "",
         [("weather", {"city": "a]b\n", "far": True, "t": -1500.0})]),
        ("pythonic", "[1, 2]", "[1, 2]", []),
    ],
)  # fmt: skip
def test_calls_of_each_style(syntax: str, text: str, shown: str, calls: list[Any]) -> None:
    assert parse(text, SYNTAXES[syntax]) == (shown, calls, 0)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> and more',
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "Paris"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 70 + "}}</tool_call>",
        "<tool_call>{'name': 'f'}</tool_call>",
        "<tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call>{]</tool_call>",
    ],
)
def test_what_is_no_call_stays_text_and_is_counted(text: str) -> None:
    assert parse(text) == (text, [], 1)


def test_a_call_after_a_broken_one_is_read() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(text) == ('<tool_call>{"name": "f", "arguments": {}</tool_call>', [("f", {})], 1)


@pytest.mark.parametrize(
    "text",
    [
        "[f(__import__('os'))]", "[f(a=open('x'))]", "[f(a=b)]", "[f(1)]", "[f(a=1, a=2)]", "[f(a=1 b=2)]", "[f(a='x)]",
        "[f(a=" + "[" * 40 + "]" * 40 + ")]", "[f(a=1) + 1]", "[f]", "[f(a={1: 2})]", "[f(a='\\xg0')]", "[f(a=1e)]",
        "[f(a='\\U00110000')]", "[f(**{'a': 1})]", "[f(a=--1)]", "[]", "[f(a='\\ud8')]",
    ],
)  # fmt: skip
def test_nothing_but_literals_is_read_as_python(text: str) -> None:
    assert parse(text, BARE_PYTHONIC) == (text, [], 0)


@pytest.mark.parametrize(
    "value",
    [
        'say "hi"',
        "C:\\new\\table\\u0041.txt",
        "日本語 🗼",
        "a\nb\tc",
        "\\\\server\\x",
        "</tool_call>",
        "\\n",
        "\u2028",
        "",
    ],
)
def test_b46_arguments_are_unescaped_once(value: str) -> None:
    """Quotes, a Windows path, CJK: what the model wrote is what the tool gets, also if it wrote the object as a text."""
    arguments = {"path": value}
    for written in (arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)):
        for ascii_only in (True, False):
            call = json.dumps({"name": "f", "arguments": written}, ensure_ascii=ascii_only)
            assert parse(f"<tool_call>\n{call}\n</tool_call>") == ("", [("f", arguments)], 0)
    if "\\" not in value:
        assert parse(f"[f(path={value!r})]", BARE_PYTHONIC) == ("", [("f", arguments)], 0)


@pytest.mark.parametrize("written", ['{"name": "f"}', '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": null}',
                                     '{"name": "f", "arguments": "{}"}', '{"name": "f", "parameters": {}}'])  # fmt: skip
def test_b46_no_arguments_are_an_empty_object(written: str) -> None:
    reading = parser(GENERIC)
    read(reading, [f"<tool_call>{written}</tool_call>"])
    assert [call.arguments for call in reading.calls] == ["{}"]


def test_half_a_surrogate_pair_stays_json() -> None:
    text = canonical_arguments({"a": "\ud800", "é": 1})
    text.encode()
    assert json.loads(text) == {"a": "\ud800", "é": 1}


def test_raw_line_breaks_in_texts_are_taken() -> None:
    assert parse('<tool_call>{"name": "f", "arguments": {"code": "a\nb"}}</tool_call>') == (
        "",
        [("f", {"code": "a\nb"})],
        0,
    )


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(chunks=chunked(PIECES))
def test_every_way_of_cutting_gives_the_same(syntax: str, chunks: list[str]) -> None:
    at_once, cut = parser(SYNTAXES[syntax]), parser(SYNTAXES[syntax])
    assert read(cut, chunks) == read(at_once, ["".join(chunks)])
    assert (cut.calls, cut.invalid) == (at_once.calls, at_once.invalid)
    for call in cut.calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name in NAMES


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), values, max_size=4), st.data())
def test_what_was_written_is_what_is_read(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = "Now:\n<tool_call>\n" + json.dumps({"name": "say", "arguments": arguments}) + "\n</tool_call>"
    reading = parser(GENERIC)
    events = read(reading, data.draw(cut_anywhere(text)))
    assert events[0] == TextDelta("Now:")
    assert json.loads(reading.calls[0].arguments) == arguments
    assert len(events) == 2


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize(
    "piece", ["<tool_call>", '<tool_call>{"a": "', "{", "[", "[f(", " ", '{"a":"\\', "<|tool_call_start|>[f(a='", "<"]
)
def test_the_cost_is_linear_in_the_text(syntax: str, piece: str) -> None:
    costs = [operations(lambda: parser(SYNTAXES[syntax]), piece * n) for n in (100, 200)]
    assert costs[1] < 2.2 * costs[0]


def test_a_call_may_have_a_mebibyte_and_no_more() -> None:
    start = '<tool_call>{"name": "f", "arguments": {"a": "'
    for size, called in ((MAX_CALL_CHARACTERS - 100, True), (MAX_CALL_CHARACTERS, False)):
        reading = parser(GENERIC)
        text = start + "x" * size + '"}}</tool_call>'
        shown = "".join(e.text for e in read(reading, [text]) if isinstance(e, TextDelta))
        assert (bool(reading.calls), shown == text, reading.invalid) == (called, not called, int(not called))


def test_an_answer_has_a_bounded_number_of_calls() -> None:
    made = [f'<tool_call>{{"name": "f", "arguments": {{"n": {n}}}}}</tool_call>' for n in range(MAX_CALLS + 1)]
    shown, calls, invalid = parse("".join(made))
    assert (shown, len(calls), invalid) == (made[-1], MAX_CALLS, 1)


def test_a_call_is_told_once() -> None:
    reading = parser(GENERIC)
    read(reading, ['<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'])
    assert (len(reading.calls), reading.repeats, reading.invalid) == (1, True, 0)


def test_ids_are_unique_and_fit_every_template() -> None:
    ids = {new_call_id() for _ in range(2000)}
    assert len(ids) == 2000
    assert all(len(i) == 9 and i.isalnum() and i.isascii() for i in ids)


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{% if tools %}<tool_call>\n{% endif %}", GENERIC),
        ("{{ tools }}[TOOL_CALLS] [", MISTRAL),
        ("{{ tools }}<|tool_call_start|>", LFM),
        ('{{ tools }}{"name": "\' + f + \'", "parameters": ', LLAMA),
        ("{{ messages }}<tool_call>", None),
        ("{{ tools }}<tool_call><arg_key>", None),
        ("{{ tools }}<tool_call><function=f>", None),
        ("{{ tools }}", None),
    ],
)
def test_the_syntax_is_found_in_the_template(template: str, syntax: ToolSyntax | None) -> None:
    assert ToolSyntax.detect(template) == syntax


@pytest.mark.parametrize(
    "spec", [{"form": "xml"}, {"begin": "x" * 65}, {"begin": " x"}, {"begin": ""}, {"arguments": ""}]
)
def test_a_syntax_that_cannot_be(spec: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"marker|valid|need"):
        ToolSyntax.of(spec)
    assert ToolSyntax.of({}) is None
    assert ToolSyntax.of({"form": "json", "begin": "[TOOL_CALLS]", "end": ""}) == MISTRAL
