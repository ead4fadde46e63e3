"""TextStream: text as it comes, and where it ends (B1, B2, B7, B9 and their kinds)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.engine.stream import AnswerReaders, Delta, TextStream
from edge_llm.messages import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta
from edge_llm.sampling.decoders import Selection
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampled
from edge_llm.text.channels import ChannelSplitter, ReasoningMarkers
from edge_llm.text.tool_calls import ToolCallParser
from edge_llm.text.tool_syntax import GENERIC
from tests.engine.fakes import END, VOCAB, byte_ids, tokenizer


def stream(max_tokens: int = 1000, *, eos: Iterable[int] = (END, 0), **params: object) -> TextStream:
    return TextStream(tokenizer(), SamplingParams(**params), end_ids=frozenset(eos), max_tokens=max_tokens)


def run(made: TextStream, ids: Iterable[int]) -> list[TextDelta]:
    """One token a step until the end; the deltas."""
    deltas = []
    for token_id in ids:
        deltas += made.feed(Selection((Sampled(token_id),)))
        if made.finish is not None:
            break
    deltas += made.flush()
    return deltas


def joined(deltas: Iterable[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(max_examples=60)
@given(st.text(max_size=30))
def test_deltas_are_the_whole_text_and_never_half_a_character(text: str) -> None:
    """B1: every byte is a token of its own here."""
    text = text.encode("utf-8", "replace").decode().replace("\ufffd", "")
    deltas = run(stream(), [*byte_ids(text), END])
    assert joined(deltas) == text
    assert all(delta.text and "\ufffd" not in delta.text for delta in deltas)


def test_half_a_character_waits_and_what_is_invalid_is_shown_once() -> None:
    """B2: incomplete tails wait for their rest; bytes that can never become a character give one replacement."""
    assert joined(run(stream(), [*byte_ids("🗼".encode()[:2]), *byte_ids(" x"), END])) == "\ufffd x"
    assert joined(run(stream(), [*byte_ids(b"\xff"), *byte_ids("é"), END])) == "\ufffdé"


def test_half_a_character_at_the_end_is_not_shown() -> None:
    made = stream(max_tokens=3)
    assert joined(run(made, byte_ids("a🗼"))) == "a"
    assert made.finish is FinishReason.LENGTH
    assert made.completion_tokens == 3


@pytest.mark.parametrize("end", [END, 0])
def test_any_end_token_ends_and_none_is_shown(end: int) -> None:
    """B9."""
    made = stream()
    assert joined(run(made, [*byte_ids("yes"), end, *byte_ids("no")])) == "yes"
    assert made.finish is FinishReason.STOP
    assert made.matched_stop is None
    assert made.token_ids == byte_ids("yes")
    assert made.completion_tokens == 4


def test_end_tokens_can_be_passed_over() -> None:
    made = stream(max_tokens=5, eos=())
    assert joined(run(made, [*byte_ids("a"), END, *byte_ids("b"), 0, *byte_ids("cd")])) == "abc"
    assert made.finish is FinishReason.LENGTH


def test_a_stop_that_names_a_control_token() -> None:
    """B9: it comes as one id without text."""
    made = stream(eos=(0,), stop=("<|im_end|>",))
    assert joined(run(made, [*byte_ids("yes"), END, *byte_ids("no")])) == "yes"
    assert made.matched_stop == "<|im_end|>"
    assert made.finish is FinishReason.STOP


def test_a_stop_over_several_tokens_leaks_nothing() -> None:
    """B7."""
    made = stream(stop=("O P Q", "zzz"))
    deltas = run(made, byte_ids("M N O P O P Q R"))
    assert joined(deltas) == "M N O P "
    assert made.matched_stop == "O P Q"
    assert made.finish is FinishReason.STOP


def test_text_held_back_for_a_stop_comes_at_the_end() -> None:
    deltas = run(stream(stop=("O P Q",)), [*byte_ids("N O P"), END])
    assert joined(deltas) == "N O P"
    assert [delta.text for delta in deltas] == ["N", " ", "O P"]


def test_max_tokens_counts_every_token() -> None:
    made = stream(max_tokens=3)
    assert joined(run(made, byte_ids("abcdef"))) == "abc"
    assert made.finish is FinishReason.LENGTH
    made = stream(max_tokens=3)
    run(made, [*byte_ids("ab"), END])
    assert made.finish is FinishReason.STOP


def test_a_step_of_several_tokens_gives_one_delta_and_is_cut_at_the_end() -> None:
    made = stream()
    a, b, c = byte_ids("abc")
    assert made.feed(Selection((Sampled(a), Sampled(b)), forced=(c,))) == [TextDelta("abc")]
    assert made.finish is None
    assert made.feed(Selection((Sampled(END), Sampled(b)), forced=(c,))) == []
    assert made.finish is FinishReason.STOP
    assert made.token_ids == [a, b, c]
    assert made.flush() == []


def test_a_decoder_may_end_the_answer() -> None:
    made = stream()
    assert made.feed(Selection((Sampled(byte_ids("a")[0]),), finish=FinishReason.STOP)) == [TextDelta("a")]
    assert made.finish is FinishReason.STOP
    made = stream()
    assert made.feed(Selection((), finish=FinishReason.TOOL_CALLS)) == []
    assert made.finish is FinishReason.TOOL_CALLS


def reported(ids: Iterable[int]) -> list[Selection]:
    return [Selection((Sampled(i, -float(i), ((i, -float(i)), (END, -50.0))),)) for i in ids]


def test_reports_come_with_text_and_tell_the_bytes() -> None:
    """B52: a token that is half a character has bytes of its own."""
    made = stream(logprobs=True, top_logprobs=2)
    ids = byte_ids("aé")
    deltas = [made.feed(selection) for selection in reported(ids)]
    assert [[delta.text for delta in told] for told in deltas] == [["a"], [], ["é"]]
    first, last = deltas[0][0].tokens, deltas[2][0].tokens
    assert [info.chosen.data for info in (*first, *last)] == [b"a", b"\xc3", b"\xa9"]
    assert [info.chosen.logprob for info in last] == [-float(i) for i in ids[1:]]
    assert last[0].alternatives[1].data == b"<|im_end|>"


def test_reports_never_run_into_a_stop() -> None:
    made = stream(logprobs=True, stop=("XY",))
    tokens = []
    for selection in reported(byte_ids("aXbXY")):
        tokens += [info.chosen.data for delta in made.feed(selection) for info in delta.tokens]
    assert made.flush() == []
    assert b"".join(tokens) == b"aXb"


def test_reports_left_at_the_end_are_given() -> None:
    made = stream(max_tokens=2, logprobs=True)
    deltas = [made.feed(selection) for selection in reported(byte_ids("aé")[:2])]
    (tail,) = made.flush()
    assert deltas[1] == []
    assert (tail.text, [info.chosen.data for info in tail.tokens]) == ("", [b"\xc3"])


def test_an_id_without_text_is_silent() -> None:
    made = stream()
    assert made.feed(Selection((Sampled(VOCAB + 5),))) == []
    assert made.token_ids == [VOCAB + 5]


CALL = '<tool_call>{"name": "f", "arguments": {"a": "Z"}}</tool_call>'


def reading_stream(max_calls: int = 32, **params: object) -> TextStream:
    readers = AnswerReaders(
        ChannelSplitter(ReasoningMarkers("<think>", "</think>")), ToolCallParser(GENERIC, ["f"]), max_calls=max_calls
    )
    limit = params.pop("max_tokens", 1000)
    return TextStream(
        tokenizer(), SamplingParams(**params), end_ids=frozenset({END}), max_tokens=limit, readers=readers
    )


def shown(deltas: Iterable[Delta]) -> list[str]:
    """Texts with the channel's first letter, those in a row joined; calls as name and arguments."""
    said: list[str] = []
    for delta in deltas:
        kind = {TextDelta: "t:", ReasoningDelta: "r:", ToolCallDelta: "c:"}[type(delta)]
        text = f"{delta.name}{delta.arguments}" if isinstance(delta, ToolCallDelta) else delta.text
        if said and said[-1].startswith(kind) and kind != "c:":
            said[-1] += text
        else:
            said.append(kind + text)
    return said


def test_reasoning_text_and_calls_come_apart() -> None:
    made = reading_stream()
    deltas = run(made, [*byte_ids(f"<think>Hm.</think>\n\nLook: {CALL}\n{CALL.replace('Z', 'Y')}"), END])
    assert shown(deltas) == ["r:Hm.", "t:Look:", 'c:f{"a": "Z"}', 'c:f{"a": "Y"}']
    assert made.reasoning_tokens == len(">Hm.</think>")  # from the token that makes the marker whole
    assert [call.name for call in made.tool_calls] == ["f", "f"]
    assert made.finish is FinishReason.STOP


def test_an_answer_may_end_with_its_first_call() -> None:
    made = reading_stream(max_calls=1)
    assert shown(run(made, [*byte_ids(f"{CALL}{CALL}"), END])) == ['c:f{"a": "Z"}']
    assert made.finish is FinishReason.TOOL_CALLS
    assert made.completion_tokens < len(CALL) + 1


def test_stops_are_looked_for_in_the_answer_alone() -> None:
    made = reading_stream(stop=("Z",))
    deltas = run(made, [*byte_ids(f"<think>Z</think>a{CALL}bZc"), END])
    assert shown(deltas) == ["r:Z", "t:a", 'c:f{"a": "Z"}', "t:b"]
    assert made.matched_stop == "Z"


def test_a_stop_string_does_not_go_across_a_call() -> None:
    made = reading_stream(stop=("ab",))
    assert shown(run(made, [*byte_ids(f"a{CALL}b"), END])) == ["t:a", 'c:f{"a": "Z"}', "t:b"]
    assert made.matched_stop is None


def test_what_was_cut_is_shown_as_far_as_it_came() -> None:
    for text, told, invalid in (
        (CALL[:30], ["t:" + CALL[:30]], 1),
        ("<think>Hm. </th", ["r:Hm. </th"], 0),
        ("<thi", ["t:<thi"], 0),
        ("a \n", ["t:a \n"], 0),
    ):
        made = reading_stream(max_tokens=len(text))
        assert shown(run(made, byte_ids(text))) == told
        assert made.finish is FinishReason.LENGTH
        assert made.invalid_tool_calls == invalid


def test_reports_are_those_of_the_answer() -> None:
    made = reading_stream(logprobs=True)
    deltas = []
    for selection in reported(byte_ids(f"<think>no</think>yes{CALL}ok")):
        deltas += made.feed(selection)
    deltas += made.flush()
    data = b"".join(info.chosen.data for delta in deltas if isinstance(delta, TextDelta) for info in delta.tokens)
    assert data == b"yesok"


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", "Z", " ", "a"]), max_size=8), st.data())
def test_steps_of_several_tokens_say_the_same(pieces: list[str], data: st.DataObject) -> None:
    ids = [*byte_ids("".join(pieces)), END]
    one_by_one = run(reading_stream(stop=("Z",)), ids)
    made = reading_stream(stop=("Z",))
    deltas: list[Delta] = []
    while ids and made.finish is None:
        count = data.draw(st.integers(1, 9))
        deltas += made.feed(Selection(tuple(map(Sampled, ids[:count]))))
        ids = ids[count:]
    deltas += made.flush()
    assert shown(deltas) == shown(one_by_one)
