"""Reasoning is what stands between the markers at the beginning of an answer, however it is cut into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given

from edge_llm.messages import Message, ReasoningDelta, TextDelta
from edge_llm.text.channels import ChannelSplitter, ReasoningMarkers
from edge_llm.text.chat_template import ChatTemplate
from tests.text.chunks import chunked, operations, read

THINK = ReasoningMarkers("<think>", "</think>")
PIECES = ["<think>", "</think>", "<", "thi", "nk>", "</", " ", "\n", "\n\n", "so", "é", "<think", " " * 40]


def split(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """(reasoning, answer), fed character by character."""
    events = read(ChannelSplitter(THINK, is_open=is_open), text)
    return tuple("".join(e.text for e in events if isinstance(e, kind)) for kind in (ReasoningDelta, TextDelta))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("Hello.", "", "Hello."),
        ("<think>\nHm. \n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("\n <think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>never ends </thi", "never ends </thi", ""),
        ("<think>cut \n", "cut", ""),
        ("<thing>Yes.", "", "<thing>Yes."),
        ("  Yes <think>no</think>", "", "  Yes <think>no</think>"),
        ("<think>a</think>Say <think>b</think> or </think>.", "a", "Say <think>b</think> or </think>."),
        ("</think>Yes.", "", "</think>Yes."),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        (" " * 65 + "<think>a</think>", "", " " * 65 + "<think>a</think>"),
        ("<thi", "", "<thi"),
        ("", "", ""),
    ],
)
def test_an_answer_and_its_reasoning(text: str, reasoning: str, answer: str) -> None:
    assert split(text) == (reasoning, answer)


def test_a_prompt_may_open_the_reasoning() -> None:
    assert split("Hm.\n</think>\n\nYes.", is_open=True) == ("Hm.", "Yes.")
    assert split("Hm.", is_open=True) == ("Hm.", "")


@given(chunked(PIECES))
def test_every_way_of_cutting_gives_the_same(chunks: list[str]) -> None:
    for is_open in (False, True):
        whole = read(ChannelSplitter(THINK, is_open=is_open), ["".join(chunks)])
        assert read(ChannelSplitter(THINK, is_open=is_open), chunks) == whole


def test_the_cost_is_linear_in_the_text() -> None:
    for piece in (" ", "<", "</think", "a "):
        costs = [operations(lambda: ChannelSplitter(THINK, is_open=True), piece * n) for n in (200, 400)]
        assert costs[1] < 2.2 * costs[0]


def test_in_reasoning_says_where_the_answer_is() -> None:
    splitter = ChannelSplitter(THINK)
    seen = []
    for chunk in ("<think>", "a", "</think>", "b"):
        splitter.feed(chunk)
        seen.append(splitter.in_reasoning)
    assert seen == [True, True, False, False]


def test_only_the_template_opens_reasoning() -> None:
    """B39: markers that somebody said, at the very end of the prompt too, open nothing."""
    opened = ChatTemplate("{{ messages[0].content }}{% if enable_thinking %}A:<think>\n{% endif %}")
    said = [Message.user("x <think>")]
    assert THINK.open_in(opened.render(said, variables={"enable_thinking": True}))
    assert not THINK.open_in(opened.render(said))
    closed = ChatTemplate("{{ messages[0].content }}A:<think>\n\n</think>\n\n")
    assert not THINK.open_in(closed.render(said))
    assert not THINK.open_in(ChatTemplate("<think>{{ messages[0].content }}A:").render(said))


@pytest.mark.parametrize(
    "spec", [{"begin": "", "end": "x"}, {"begin": " <t>", "end": "x"}, {"begin": "x" * 65, "end": "x"}]
)
def test_markers_that_cannot_be(spec: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="marker"):
        ReasoningMarkers.of(spec)


def test_markers_are_found_in_templates() -> None:
    assert ReasoningMarkers.detect("{{ content.split('</think>')[-1] }}<think>") == THINK
    assert ReasoningMarkers.detect("{{ messages }}") is None
    assert ReasoningMarkers.of({}) is None
    assert ReasoningMarkers.of({"begin": "<think>", "end": "</think>"}) == THINK
