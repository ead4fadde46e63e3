"""A conversation as a file: Markdown to read, JSON to work with."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_llm.errors import StorageError
from edge_llm.messages import Role
from edge_llm_chat.conversation import Conversation, State, Turn

_NAMES = {Role.USER: "You", Role.ASSISTANT: "Answer", Role.SYSTEM: "System", Role.TOOL: "Tool"}


def to_markdown(conversation: Conversation) -> str:
    """The path that is shown."""
    parts = [f"# {conversation.title or 'Chat'}"]
    if conversation.system is not None:
        parts.append(f"## System\n\n{conversation.system}")
    for turn in conversation.path():
        ending = f" ({turn.state})" if turn.state is not State.COMPLETE else ""
        parts.append(f"## {_NAMES[turn.role]}{ending}")
        parts += [f"File `{item.name}`:\n\n{_fenced(item.text)}" for item in turn.attachments]
        parts += [turn.content] if turn.content else []
        parts += [f"Calls `{call.name}`:\n\n{_fenced(call.arguments)}" for call in turn.tool_calls]
    return "\n\n".join(parts) + "\n"


def _fenced(text: str) -> str:
    """`text` as a block of code, whatever it holds."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def to_json(conversation: Conversation) -> str:
    """All turns, with their parents, and which of them are shown."""
    shown = {turn.id for turn in conversation.path()}
    document = {
        "format": "edge-llm chat 1",
        "title": conversation.title,
        "system": conversation.system,
        "model": conversation.model,
        "parameters": conversation.parameters,
        "tags": list(conversation.tags),
        "turns": [
            _turn(turn, turn.id in shown) for turn in sorted(conversation.turns.values(), key=lambda one: one.id)
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _turn(turn: Turn, shown: bool) -> dict[str, Any]:
    return {
        "id": turn.id,
        "parent": turn.parent,
        "shown": shown,
        "role": turn.role,
        "content": turn.content,
        "reasoning": turn.reasoning,
        "tool_calls": [asdict(call) for call in turn.tool_calls],
        "tool_call_id": turn.tool_call_id,
        "attachments": [asdict(item) for item in turn.attachments],
        "state": turn.state,
        "created": turn.created,
        "facts": asdict(turn.facts),
    }


def export(conversation: Conversation, path: str) -> Path:
    """Write a new file and give its path, made from the title if `path` is empty.

    Raises `StorageError`, also for a file that exists.
    """
    words = re.sub(r"[^\w-]+", "-", conversation.title.lower()).strip("-")[:40]
    target = Path(os.path.expanduser(path or f"{words or 'chat'}.md")).absolute()
    text = to_json(conversation) if target.suffix == ".json" else to_markdown(conversation)
    try:
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}", hint="name another file") from None
    return target
