"""What of a turn is neither searched for nor sorted by, as JSON in the database."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from edge_llm.messages import ToolCall
from edge_llm_chat.conversation import Attachment, Facts, State, Turn


def write_details(turn: Turn) -> str:
    kept: dict[str, Any] = {"state": turn.state, "facts": asdict(turn.facts)}
    if turn.reasoning:
        kept["reasoning"] = turn.reasoning
    if turn.attachments:
        kept["attachments"] = [[item.name, item.text] for item in turn.attachments]
    if turn.tool_calls:
        kept["tool_calls"] = [[call.id, call.name, call.arguments] for call in turn.tool_calls]
    if turn.tool_call_id is not None:
        kept["tool_call_id"], kept["tool_name"] = turn.tool_call_id, turn.tool_name
    if turn.token_ids is not None:
        kept["token_ids"], kept["tokenizer_digest"] = list(turn.token_ids), turn.tokenizer_digest
    return json.dumps(kept)


def read_details(text: str) -> dict[str, Any]:
    kept = json.loads(text)
    ids = kept.get("token_ids")
    return {
        "state": State(kept["state"]),
        "facts": Facts(**kept["facts"]),
        "reasoning": kept.get("reasoning", ""),
        "attachments": tuple(Attachment(*item) for item in kept.get("attachments", ())),
        "token_ids": None if ids is None else tuple(ids),
        "tokenizer_digest": kept.get("tokenizer_digest"),
        "tool_calls": tuple(ToolCall(*call) for call in kept.get("tool_calls", ())),
        "tool_call_id": kept.get("tool_call_id"),
        "tool_name": kept.get("tool_name"),
    }
