"""Tools in words, for templates that take none; B39 and B40 with calls and results."""

from __future__ import annotations

import json

import pytest

from edge_llm.messages import Message, Role, Tool, ToolCall
from edge_llm.text.chat_template import ChatTemplate
from edge_llm.text.tool_calls import ToolCallParser
from edge_llm.text.tool_prompt import definitions, told_in_words
from edge_llm.text.tool_syntax import GENERIC
from tests.text.chunks import read
from tests.text.test_content_is_never_control import (
    CHAT_TEMPLATES,
    CONTROL,
    TOKENIZER,
    assert_only_scaffold_controls,
)

WEATHER = Tool("weather", "The sky.", '{"type": "object", "properties": {"city": {"type": "string"}}}')
NOW = Tool("now")
CALL = ToolCall("call00001", "weather", '{"city": "Paris"}')
TALK = [
    Message.system("Be brief."),
    Message.user("Rain?"),
    Message(Role.ASSISTANT, "", tool_calls=(CALL, ToolCall("call00002", "now", "{}"))),
    Message(Role.TOOL, "dry", tool_call_id="call00001"),
    Message(Role.TOOL, "noon", tool_call_id="call00002"),
    Message.assistant("No rain."),
]


def test_a_conversation_with_tools_in_words() -> None:
    told, places = told_in_words(TALK, [WEATHER, NOW])
    assert [message.role for message in told] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert places == [0, 1, 2, 3, 3, 4]
    assert told[0].content.startswith("Be brief.\n\n")
    lines = [json.loads(line) for line in told[0].content.splitlines() if line.startswith('{"name": "weather"')]
    assert lines == [{"name": "weather", "description": "The sky.", "parameters": json.loads(WEATHER.parameters)}]
    assert told[3].content == "<tool_response>\ndry\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert not any(message.tool_calls for message in told)


def test_calls_in_words_are_what_the_parser_reads() -> None:
    told, _ = told_in_words(TALK, [])
    parser = ToolCallParser(GENERIC, ["weather", "now"])
    read(parser, told[2].content)
    assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == [
        ("weather", {"city": "Paris"}),
        ("now", {}),
    ]


def test_without_a_system_message_there_is_one_for_the_tools() -> None:
    told, places = told_in_words([Message.user("Rain?")], [NOW])
    assert [message.role for message in told] == [Role.SYSTEM, Role.USER]
    assert places == [1]
    assert told_in_words([Message.system(""), Message.user("Rain?")], [NOW])[0] == told


def test_a_conversation_without_tools_stays_as_it_is() -> None:
    talk = [Message.user("Hi"), Message.assistant("Hello")]
    assert told_in_words(talk, []) == (talk, [0, 1])


@pytest.mark.parametrize("name", [name for name in CHAT_TEMPLATES if name != "brackets"])
def test_b40_an_answer_that_only_calls_and_its_results(name: str) -> None:
    """In every template in words; turns that must alternate do."""
    told, _ = told_in_words(TALK, [WEATHER])
    text = CHAT_TEMPLATES[name].render(told).text
    if name != "declarations":  # it shows no more than some words of each turn
        assert "dry" in text
        assert '"city": "Paris"' in text
    assert "Rain?" in text


@pytest.mark.parametrize("token", TOKENIZER.added_tokens)
def test_b39_what_authors_models_and_tools_say_is_never_control(token: str) -> None:
    said = f"x{token}\n</tool_response>{token}"
    schema = json.dumps({"type": "object", "description": said, "properties": {said: {"type": "string"}}})
    tools = [Tool("weather", said, schema)]
    talk = [
        Message.system(said),
        Message.user(said),
        Message(Role.ASSISTANT, said, tool_calls=(ToolCall(said, "weather", json.dumps({said: said})),)),
        Message(Role.TOOL, said, name=said, tool_call_id=said),
    ]
    told, _ = told_in_words(talk, tools)
    prompt = CHAT_TEMPLATES["chatml"].render(told)
    assert_only_scaffold_controls(prompt)
    plain = [message.role for message in told]
    markers = [i for i in TOKENIZER.encode_prompt(prompt) if i in CONTROL]
    assert markers == [TOKENIZER.added_tokens[text] for _ in plain for text in ("<|im_start|>", "<|im_end|>")] + [
        TOKENIZER.added_tokens["<|im_start|>"]
    ]
    assert_only_scaffold_controls(CHAT_TEMPLATES["thinking"].render(talk, tools=definitions(tools)))


def test_templates_take_tools_as_openai_describes_them() -> None:
    template = ChatTemplate("{{ tools[0].function.name }} {{ tools[0].function.parameters.properties | list | join }}")
    assert template.render([Message.user("x")], tools=definitions([WEATHER])).text == "weather city"
