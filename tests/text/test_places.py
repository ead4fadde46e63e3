"""Where messages lie among the tokens of a prompt: found again from the bytes of each token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.messages import Message, Role, ToolCall
from edge_llm.text.chat_template import ChatTemplate
from edge_llm.text.places import message_places, token_spans
from edge_llm.text.prompt import RenderedPrompt, origin_of_message
from tests.text.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHATML = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
PLAIN = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
words = st.text("ab helo wrd\n\té東🗼<|>", max_size=12)


def by_bytes(prompt: RenderedPrompt, ids: list[int]) -> dict[int, range]:
    """The tokens of each message that has text, from the bytes that each token stands for."""
    owners = [origin for text, origin in zip(prompt.text, prompt.origins, strict=True) for _ in text.encode()]
    found: dict[int, range] = {}
    done = 0
    for place, token_id in enumerate(ids):
        size = len(TOKENIZER.token_bytes(token_id))
        for index in {prompt.message_of(owner) for owner in owners[done : done + size]} - {None}:
            found[index] = range(found.get(index, range(place, place)).start, place + 1)
        done += size
    assert done == len(owners)
    return found


@given(st.lists(words, min_size=1, max_size=6), st.sampled_from([CHATML, PLAIN]), st.data())
def test_places_are_those_of_the_bytes(contents: list[str], template: ChatTemplate, data: st.DataObject) -> None:
    messages = []
    for content in contents:
        sampled = data.draw(st.booleans())
        ids = tuple(i for character in content for i in TOKENIZER.encode_content(character)) if sampled else None
        digest = TOKENIZER.digest if sampled else None
        messages.append(Message(Role.USER, content, token_ids=ids, tokenizer_digest=digest))
    prompt = template.render(messages)
    ids, places = TOKENIZER.encode_conversation(prompt)
    assert ids == TOKENIZER.encode_prompt(prompt)
    known = by_bytes(prompt, ids)
    assert len(places) == len(contents)
    for index, content in enumerate(contents):
        assert (index in known) == bool(content)
        if content:
            assert places[index] == known[index]
        else:  # between the neighbours
            before = max((known[i].stop for i in known if i < index), default=0)
            after = min((known[i].start for i in known if i > index), default=len(ids))
            assert places[index] == range(before, max(before, after))


def test_a_message_that_only_calls_a_tool_lies_where_the_call_is_shown() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}"
    )
    call = ToolCall("1", "now", "{}")
    messages = [Message.user("ab"), Message(Role.ASSISTANT, "", tool_calls=(call,)), Message(Role.TOOL, "cd")]
    ids, places = TOKENIZER.encode_conversation(template.render(messages))
    assert TOKENIZER.decode(ids[slice(places[1].start, places[1].stop)]) == "now"
    assert (places[0].stop, places[2].start) == (places[1].start, places[1].stop)


@pytest.mark.parametrize("content", ["a\ud83d\uddfcb", "\ud83d", "\ud83d\uddfc" * 3])
def test_halves_of_characters_make_a_place_wider_but_never_too_small(content: str) -> None:
    prompt = CHATML.render([Message.user("x"), Message.user(content), Message.user("y")])
    ids, places = TOKENIZER.encode_conversation(prompt)
    assert ids == TOKENIZER.encode_prompt(prompt)
    shown = TOKENIZER.decode(ids[slice(places[1].start, places[1].stop)])
    assert content.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") in shown
    assert [TOKENIZER.decode(ids[slice(p.start, p.stop)]) for p in (places[0], places[2])] == ["x", "y"]


def test_a_message_shown_twice_reaches_from_the_first_to_the_last() -> None:
    template = ChatTemplate("{{ messages[0].content }}<|im_end|>{{ messages[1].content }}{{ messages[0].content }}")
    ids, places = TOKENIZER.encode_conversation(template.render([Message.user("a"), Message.user("b")]))
    assert places == (range(len(ids)), range(2, 3))


def test_more_messages_than_origins_are_content_of_nobody() -> None:
    assert origin_of_message(10**7) == "\0"
    prompt = RenderedPrompt("ab", origin_of_message(0) + origin_of_message(10**7), (Message.user("a"),))
    assert message_places(prompt, [(0, 1), (1, 2)]) == (range(1),)


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        ([b"a", "é".encode(), b"bc"], [(3, 4), (4, 5), (5, 7)]),
        ([b"a\xc3", b"\xa9b", b"", b"c"], [(3, 5), (4, 6), (6, 6), (6, 7)]),
        ([b" a", b"\xc3", b"\xa9bc"], [(3, 4), (4, 5), (4, 7)]),
        ([b" ", "aébc".encode()], [(3, 3), (3, 7)]),
        ([b"a", "e\u0301".encode(), b"bc"], [(3, 7)] * 3),
        ([b"abc"], [(3, 7)]),
    ],
    ids=["whole", "halves", "a space before", "only a space", "normalised", "without token"],
)
def test_spans_are_the_characters_that_a_token_holds_bytes_of(
    tokens: list[bytes], spans: list[tuple[int, int]]
) -> None:
    """A character in two tokens lies in both; where tokens say something else than the text, all are everywhere."""
    assert token_spans("xyzaébcx", 3, 7, tokens) == spans
