"""token_infos: the `logprobs` of OpenAI's chunks as `TokenInfo`s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edge_llm.messages import TokenInfo, TokenLogprob


def token_infos(logprobs: object) -> tuple[TokenInfo, ...]:
    """Empty for what is not of that shape. Servers of ours tell the tokens' ids; else they are numbered by their bytes."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return ()
    infos = []
    for entry in content:
        chosen = _token(entry)
        if chosen is None:
            return ()
        listed = entry.get("top_logprobs")
        others = [_token(other) for other in listed] if isinstance(listed, list) else []
        infos.append(TokenInfo(chosen, tuple(other for other in others if other is not None)))
    return tuple(infos)


def _token(entry: Any) -> TokenLogprob | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("token"), str):
        return None
    logprob = entry.get("logprob")
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not math.isfinite(logprob):
        return None
    listed = entry.get("bytes")
    try:
        data = bytes(listed) if isinstance(listed, list) else entry["token"].encode("utf-8", "replace")
    except (ValueError, TypeError):
        data = entry["token"].encode("utf-8", "replace")
    told = entry.get("id")
    number = told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else int.from_bytes(data, "big")
    return TokenLogprob(number, data, float(min(0.0, logprob)))
