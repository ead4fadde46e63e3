"""Prompts as `transformers` renders them; what a template refuses is said in its own words."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.errors import ParameterError, TemplateError
from edge_llm.messages import Message, Role, ToolCall
from edge_llm.text.chat_template import COMMON_VARIABLES, ChatTemplate
from edge_llm.text.prompt import SCAFFOLD, RenderedPrompt
from edge_llm.text.tokenizer import Tokenizer

GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "templates.json").read_text(encoding="utf-8"))
CASES = [(name, title) for name, expected in GOLDEN["expected"].items() for title in expected]

DEFAULT_SYSTEM = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nDefault.<|im_end|>\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"""


def template(name: str) -> ChatTemplate:
    source = (GOLDEN_FOLDER / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, **GOLDEN["tokens"], clock=lambda: datetime(2026, 2, 3, 4, 5, 6))


def message(raw: dict[str, Any]) -> Message:
    calls = [call["function"] | {"id": call["id"]} for call in raw.get("tool_calls", [])]
    return Message(
        Role(raw["role"]),
        raw["content"],
        name=raw.get("name"),
        tool_calls=tuple(
            ToolCall(
                c["id"], c["name"], c["arguments"] if isinstance(c["arguments"], str) else json.dumps(c["arguments"])
            )
            for c in calls
        ),
        tool_call_id=raw.get("tool_call_id"),
    )


def rendered(chat: ChatTemplate, conversation: dict[str, Any]) -> RenderedPrompt:
    options = {key: conversation[key] for key in ("add_generation_prompt", "tools", "variables") if key in conversation}
    return chat.render([message(raw) for raw in conversation["messages"]], **options)


@pytest.mark.parametrize(("name", "title"), CASES, ids=[f"{name}: {title}" for name, title in CASES])
def test_rendered_as_transformers_does(name: str, title: str) -> None:
    """Goldens by tools/make_template_goldens.py: the same text, or refused for the same reason."""
    expected = GOLDEN["expected"][name][title]
    conversation = GOLDEN["conversations"][title]
    if "text" in expected:
        assert rendered(template(name), conversation).text == expected["text"]
        return
    with pytest.raises(TemplateError) as caught:
        rendered(template(name), conversation)
    if "object" not in expected["error"] and "mapping" not in expected["error"]:
        assert expected["error"] in str(caught.value)


def test_b40_empty_system_message_is_kept() -> None:
    """B40: an empty system message is a system message: the template's default does not take its place."""
    text = ChatTemplate(DEFAULT_SYSTEM).render([Message.system(""), Message.user("hi")]).text
    assert text == "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


def test_b40_a_default_system_message_is_the_templates_own() -> None:
    """B40: a template that brings a system message of its own, as SmolLM2's does, keeps it."""
    prompt = ChatTemplate(DEFAULT_SYSTEM).render([Message.user("hi")])
    assert prompt.text.startswith("<|im_start|>system\nDefault.<|im_end|>\n<|im_start|>user\nhi")
    start = prompt.text.index("hi")
    assert prompt.origins[:start] == SCAFFOLD * start


def test_b40_system_role_where_it_is_forbidden() -> None:
    """B40: the template's own reason, as an error that the caller can mend."""
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role\n not supported') }}{% endif %}"
    with pytest.raises(TemplateError, match="System role not supported") as caught:
        ChatTemplate(source).render([Message.system("x")])
    assert caught.value.hint is not None


def test_b40_two_system_messages_and_two_user_turns() -> None:
    """B40: rendered as given where the template has no rule; else its reason (also in the goldens)."""
    messages = [Message.system("a"), Message.system("b"), Message.user("c"), Message.user("d")]
    text = template("chatml").render(messages, add_generation_prompt=False).text
    assert text.count("<|im_start|>system\n") == text.count("<|im_start|>user\n") == 2
    with pytest.raises(TemplateError, match=r"Turns must go user/assistant"):
        template("brackets").render([messages[0], *messages[2:]])


def test_b40_answer_without_text_that_calls_tools() -> None:
    """B40: its content is "", its arguments are an object for the template; then a tool result follows."""
    call = ToolCall("call12345", "weather", '{"city": "Łódź", "days": 2}')
    messages = [
        Message.user("Rain?"),
        Message(Role.ASSISTANT, "", tool_calls=(call,)),
        Message(Role.TOOL, "no", tool_call_id="call12345"),
    ]
    text = template("thinking").render(messages).text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": 2}}\n</tool_call>' in text
    assert "\n<tool_response>\nno\n</tool_response>" in text


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", '{"a": NaN}', "", "[" * 100_000, "1" * 5000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = ToolCall("1", "f", arguments)
    chat = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}")
    assert chat.render([Message(Role.ASSISTANT, "", tool_calls=(call,))]).text == arguments


def test_what_is_not_there_has_no_key() -> None:
    chat = ChatTemplate("{{ messages[0] | list | join(' ') }}{{ tools is none }}{{ bos_token is defined }}")
    assert chat.render([Message.user("hi")]).text == "role contentTrueFalse"


def test_the_date_is_the_clocks() -> None:
    chat = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2026, 2, 3))
    assert chat.render([]).text == "03 Feb 2026"


def test_json_is_not_escaped() -> None:
    chat = ChatTemplate("{{ {'a': '<é&\\'>', 'b': [1, none, true]} | tojson }}")
    assert chat.render([]).text == '{"a": "<é&\'>", "b": [1, null, true]}'


def test_digest_tells_templates_apart() -> None:
    assert ChatTemplate("a").digest != ChatTemplate("b").digest
    assert len(ChatTemplate("a").digest) == 64


# -- variables


def test_variables_that_a_template_reads() -> None:
    chat = ChatTemplate(
        "{{ greeting }}{% for m in messages %}{{ m.none }}{% endfor %}{% macro f(x) %}{{ x }}{% endmacro %}{{ range(2) }}"
    )
    assert chat.variables >= {"greeting", *COMMON_VARIABLES}
    assert chat.variables.isdisjoint({"messages", "tools", "range", "x", "m", "bos_token", "raise_exception"})
    assert chat.render([], variables={"greeting": "hi", "enable_thinking": False}).text == "hirange(0, 2)"


names = st.one_of(
    st.sampled_from(["messages", "tools", "bos_token", "range", "namespace", "self", "loop", "x"]), st.text()
)
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.none()), st.just({}))


@given(st.dictionaries(names, values, max_size=3))
def test_variables_never_override_what_is_ours(variables: dict[str, Any]) -> None:
    """Any mapping is refused, or leaves messages, tools, tokens and functions as they are."""
    chat = ChatTemplate(
        "{{ messages[0].content }}{{ tools }}{{ bos_token }}{{ range(1)|list }}{{ x is defined }}", bos_token="B"
    )
    try:
        text = chat.render([Message.user("hi")], variables=variables).text
    except ParameterError:
        return
    assert text == f"hiNoneB[0]{'x' in variables}"


@pytest.mark.parametrize("value", [[], {}, object(), b"x", print])
def test_variables_are_scalars(value: Any) -> None:
    with pytest.raises(ParameterError, match="enable_thinking must be"):
        ChatTemplate("x").render([], variables={"enable_thinking": value})


# -- what callers may get wrong


@pytest.mark.parametrize("content", [None, 7, ["text"], b"bytes"])
def test_content_is_text(content: Any) -> None:
    with pytest.raises(ParameterError, match="must be text"):
        ChatTemplate("x").render([dataclasses.replace(Message.user(""), content=content)])


def test_a_role_is_one_of_ours() -> None:
    """Roles are scaffold, so that templates may make markers of them: nobody may bring one along."""
    with pytest.raises(ParameterError, match="cannot have the role"):
        ChatTemplate("<|{{ messages[0].role }}|>").render([dataclasses.replace(Message.user(""), role="im_end")])


def test_tools_are_json() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for tool in ({"f": print}, {"f": {1, 2}}, {"f": deep}):
        with pytest.raises(ParameterError):
            ChatTemplate("x").render([], tools=[tool])


@pytest.mark.parametrize(
    "source", ["{{", "{% if %}", "{% endfor %}", "{{ 1 + }}", "{% for x %}{% endfor %}", "{{ a | nofilter }}"]
)
def test_a_broken_template_is_named_by_line(source: str) -> None:
    with pytest.raises(TemplateError, match="line 2 of the chat template") as caught:
        ChatTemplate("\n" + source)
    assert "\n" not in str(caught.value)


def test_a_failure_is_one_line_with_a_hint() -> None:
    with pytest.raises(TemplateError, match=r"'dict object' has no attribute 'x'|'x' is undefined") as caught:
        ChatTemplate("{{ messages[0].x.y }}").render([Message.user("hi")])
    assert "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.real_model
def test_the_real_template(smollm2_gguf: Path) -> None:
    from edge_llm.export.gguf import read_gguf

    with read_gguf(smollm2_gguf) as gguf:
        chat = ChatTemplate(gguf.text("tokenizer.chat_template"))
    text = chat.render([Message.user("Hi <|im_end|>")]).text
    assert text.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    assert text.endswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert chat.render([Message.system("S"), Message.user("U")], add_generation_prompt=False).text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    )


@pytest.mark.real_model
def test_prompts_of_the_real_model(smollm2_gguf: Path) -> None:
    """Text and ids as `transformers` makes them of the same file (tools/make_template_goldens.py)."""
    from edge_llm.export.gguf import read_gguf
    from edge_llm.export.gguf_tokenizer import export_tokenizer

    with read_gguf(smollm2_gguf) as gguf:
        exported = export_tokenizer(gguf)
    assert exported.chat_template is not None
    chat, tokenizer = ChatTemplate(exported.chat_template), Tokenizer.from_json(exported.json)
    prompts = json.loads((GOLDEN_FOLDER / "smollm2_prompts.json").read_text(encoding="utf-8"))["prompts"]
    for title, expected in prompts.items():
        prompt = rendered(chat, GOLDEN["conversations"][title])
        assert prompt.text == expected["text"], title
        if "ids" in expected:
            assert tokenizer.encode_prompt(prompt) == expected["ids"], title
    assert sum("ids" in expected for expected in prompts.values()) > 10
