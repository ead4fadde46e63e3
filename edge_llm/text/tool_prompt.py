"""Tools in prompts: as templates take them, and in words for a model whose template takes none.

Whatever a tool's author, a model or a tool said is content in either form: it never becomes a control token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edge_llm.messages import Message, Role, Tool, ToolCall
from edge_llm.text.tool_syntax import GENERIC

_OFFER = """# Functions

You may call these functions. Each line describes one as JSON:
{tools}

To call one, answer with {begin}, a JSON object of its name and its arguments, and {end}.
Results come between <tool_response> and </tool_response>. If no function helps, answer in words."""


def definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates and OpenAI's API describe them."""
    return [{"type": "function", "function": _described(tool)} for tool in tools]


def told_in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], list[int]]:
    """The conversation with its tools, calls and results as plain text, and for each message the index of the one that
    holds it now.

    Tools are told at the end of the system message; a call stands in the answer that made it; results that follow one
    another are one turn of the user.
    """
    told: list[Message] = []
    places: list[int] = []
    for message in messages:
        if message.role is not Role.TOOL:
            told.append(_with_calls(message))
        elif told and places and messages[len(places) - 1].role is Role.TOOL:
            told[-1] = replace(told[-1], content=f"{told[-1].content}\n{_result(message)}")
        else:
            told.append(Message.user(_result(message)))
        places.append(len(told) - 1)
    if not tools:
        return told, places
    lines = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools)
    offer = _OFFER.format(tools=lines, begin=GENERIC.begin, end=GENERIC.end)
    if told and told[0].role is Role.SYSTEM:
        content = f"{told[0].content}\n\n{offer}" if told[0].content else offer
        return [replace(told[0], content=content, token_ids=None), *told[1:]], places
    return [Message.system(offer), *told], [place + 1 for place in places]


def _described(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}


def _with_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    said = [message.content] if message.content else []
    return replace(
        message, content="\n".join((*said, *map(_written, message.tool_calls))), tool_calls=(), token_ids=None
    )


def _written(call: ToolCall) -> str:
    return f'{GENERIC.begin}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{GENERIC.end}'


def _result(message: Message) -> str:
    return f"<tool_response>\n{message.content}\n</tool_response>"
