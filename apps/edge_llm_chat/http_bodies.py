"""Messages, tools and parameters as the bodies of OpenAI's API have them."""

from __future__ import annotations

import json
from typing import Any

from edge_llm.messages import Message, Role, Tool
from edge_llm.sampling.params import SamplingParams

_PARAMETERS = (
    *(
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    "seed",
)


def message_body(message: Message) -> dict[str, Any]:
    """A message as OpenAI's API has it."""
    shown: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role is Role.TOOL:
        shown["tool_call_id"] = message.tool_call_id or ""
    return shown


def tool_body(tool: Tool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def parameters_body(params: SamplingParams) -> dict[str, Any]:
    """What was set; servers do not like to be told of what was not."""
    neutral = SamplingParams()
    values = {name: getattr(params, name) for name in _PARAMETERS if getattr(params, name) != getattr(neutral, name)}
    if params.logprobs:
        values |= {"logprobs": True, "top_logprobs": params.top_logprobs}
    return values
