"""From a client's body to requests of the engine. Nothing here waits, or knows of HTTP beyond `ApiError`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from edge_llm.engine.request import Request
from edge_llm.errors import quoted
from edge_llm.messages import Message, Role, Tool, ToolCall
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import MAX_SEED, SamplingParams
from edge_llm_server.api_error import ApiError
from edge_llm_server.fields import misfit, refusals
from edge_llm_server.refused import REFUSED
from edge_llm_server.schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    Generation,
    JsonObjectFormat,
    NamedTool,
    RefusalPart,
    SchemaFormat,
    TextPart,
    ToolSpec,
)

B = TypeVar("B", bound=BaseModel)
_PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "xtc_probability", "xtc_threshold"),
    "ignore_eos",
)
"""fields that `SamplingParams` calls by the same name"""
_DEFAULT_TAU = 5.0
"""llama.cpp's, for a client that only switches mirostat on"""
_PRIORITIES = {"flex": "batch", "batch": "batch", "priority": "interactive"}


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf: whose prefixes are shared and who shares the engine with others, and how long it may take."""

    namespace: str = ""
    timeout_s: float | None = None


def checked(kind: type[B], raw: Mapping[str, Any]) -> B:
    """The body as a `kind`. Raises `ApiError` 400, naming what is wrong and what would change the answer unheard."""
    for name in sorted(raw.keys() & REFUSED.keys() - kind.model_fields.keys()):
        value = raw[name]
        if value is not None and not any(_same(value, neutral) for neutral in REFUSED[name]):
            raise ApiError.invalid(f"{name} is not supported", name, "unsupported_parameter")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise misfit(error, raw) from None


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other


def chat_requests(body: ChatBody, caller: Caller) -> list[Request]:
    """A request for each of the `n` answers. Raises `ApiError`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError.invalid("top_logprobs needs logprobs", "top_logprobs")
    longest = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = _params(body, longest, logprobs=bool(body.logprobs), top_logprobs=body.top_logprobs or 0)
    return [
        _request(
            body,
            caller,
            one,
            messages=tuple(map(message, body.messages)),
            tools=tuple(map(_tool, body.tools or ())),
            tool_choice=_tool_choice(body),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=_reasoning(body),
        )
        for one in _seeded(params, body.n or 1)
    ]


def completion_requests(body: CompletionBody, caller: Caller) -> list[Request]:
    """A request for each of the `n` answers to each prompt, in the order of the reply's choices. Raises `ApiError`."""
    if body.echo and body.logprobs is not None:
        raise ApiError.invalid("echo cannot give logprobs of the prompt", "echo", "unsupported_parameter")
    top = body.logprobs or 0
    params = _params(body, body.max_tokens, logprobs=body.logprobs is not None, top_logprobs=top)
    return [_request(body, caller, one, **prompt) for prompt in prompts(body) for one in _seeded(params, body.n or 1)]


def prompts(body: CompletionBody) -> list[dict[str, Any]]:
    """What each prompt is to a `Request`."""
    given = body.prompt
    if isinstance(given, str):
        return [{"text": given}]
    if isinstance(given[0], int):
        return [{"token_ids": tuple(given)}]
    return [{"text": one} if isinstance(one, str) else {"token_ids": tuple(one)} for one in given]


def message(given: ChatMessage) -> Message:
    """A message of the conversation. Raises `ApiError` for parts that are not text."""
    if given.role == "tool" and given.tool_call_id is None:
        raise ApiError.invalid("a message of the role tool needs the tool_call_id that it answers", "messages")
    if given.content is None and given.role != "assistant":
        raise ApiError.invalid(f"a message of the role {given.role} needs content", "messages")
    if given.tool_calls and given.role != "assistant":
        raise ApiError.invalid("only the assistant's messages have tool_calls", "messages")
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in given.tool_calls or ())
    role = Role.SYSTEM if given.role == "developer" else Role(given.role)
    return Message(role, _content(given), name=given.name, tool_calls=calls, tool_call_id=given.tool_call_id)


def _content(given: ChatMessage) -> str:
    if given.content is None:
        return given.refusal or ""
    if isinstance(given.content, str):
        return given.content
    texts = []
    for part in given.content:
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            raise ApiError.invalid(f"a part of the type {quoted(part.type)} cannot be read: text only", "messages")
    return "\n".join(texts)


def _request(body: Generation, caller: Caller, params: SamplingParams, **prompt: Any) -> Request:
    policy = {"auto": "slide", "slide": "slide", "disabled": "error", "error": "error", None: None}[body.truncation]
    grammar = _grammar(body)
    with refusals():
        return Request(
            **prompt,
            params=params,
            context_policy=policy,
            response_format=grammar,
            choices=tuple(body.choices or ()),
            cache=body.cache_prompt is not False,
            namespace=caller.namespace,
            owner=caller.namespace,
            priority=_PRIORITIES.get(body.service_tier or "", "normal"),
            timeout_s=caller.timeout_s,
        )


def _params(body: Generation, longest: int | None, *, logprobs: bool, top_logprobs: int) -> SamplingParams:
    values: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN}
    values["repetition_penalty"] = _either(body, "repetition_penalty", "repeat_penalty")
    values["max_tokens"] = longest if longest is not None else body.n_predict
    if values["max_tokens"] == -1 and longest is None:  # llama-server's "no limit"
        values["max_tokens"] = None
    values |= _mirostat(body)
    if body.dry_sequence_breakers is not None:
        values["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.seed is not None and body.seed != -1:  # -1: any, to llama-server and Ollama
        values["seed"] = body.seed if body.seed >= 0 else body.seed + MAX_SEED + 1
    with refusals(names=_names(body)):
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**given, logprobs=logprobs, top_logprobs=top_logprobs)


def _names(body: Generation) -> dict[str, str]:
    """Fields for which the body has another name."""
    names = {}
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    elif body.max_tokens is None:
        names["max_tokens"] = "n_predict"
    if body.repetition_penalty is None:
        names["repetition_penalty"] = "repeat_penalty"
    if isinstance(body, CompletionBody):
        names["top_logprobs"] = "logprobs"
    return names


def _either(body: Generation, name: str, other: str) -> Any:
    value = getattr(body, name)
    return getattr(body, other) if value is None else value


def _mirostat(body: Generation) -> dict[str, float | None]:
    if body.mirostat == 1:
        raise ApiError.invalid("mirostat 1 is not done: 2 is", "mirostat", "unsupported_parameter")
    if body.mirostat == 0:
        return {}
    tau = body.mirostat_tau if body.mirostat_tau is not None or not body.mirostat else _DEFAULT_TAU
    return {"mirostat_tau": tau, "mirostat_eta": body.mirostat_eta}


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    if not all(re.fullmatch(r"[0-9]{1,9}", name) for name in given):
        raise ApiError.invalid("the keys of logit_bias are token ids", "logit_bias")
    bias = {int(name): value for name, value in given.items()}
    if len(bias) < len(given):
        raise ApiError.invalid("logit_bias names a token twice", "logit_bias")
    return bias


def _seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    """`count` copies, each with the seed after the one before: known ones, so that the set can be asked for again."""
    if count == 1:
        return [params]
    first = params.seed if params.seed is not None else secrets.randbits(63)
    return [params.with_options(seed=(first + i) % (MAX_SEED + 1)) for i in range(count)]


def _grammar(body: Generation) -> Grammar | None:
    """What the answer must look like."""
    form = body.response_format
    grammars = []
    if body.regex is not None:
        with refusals("regex"):
            grammars.append(Grammar.regex(body.regex))
    if body.grammar:  # some clients always send an empty one
        with refusals("grammar"):
            grammars.append(Grammar.lark(body.grammar))
    if isinstance(form, JsonObjectFormat | SchemaFormat):
        with refusals("response_format"):
            grammars.append(_of_format(form))
    if len(grammars) + (body.choices is not None) > 1:
        raise ApiError.invalid("response_format, grammar, regex and choices exclude one another", "response_format")
    return grammars[0] if grammars else None


def _of_format(form: JsonObjectFormat | SchemaFormat) -> Grammar:
    schema = form.schema_ if isinstance(form, JsonObjectFormat) else form.json_schema.schema_
    return Grammar.json_object() if schema is None else Grammar.json_schema(schema)


def _tool(spec: ToolSpec) -> Tool:
    function = spec.function
    optional: dict[str, str] = {}
    if function.parameters is not None:
        optional["parameters"] = json.dumps(function.parameters, ensure_ascii=False)
    with refusals("tools"):
        return Tool(function.name, function.description or "", **optional)


def _tool_choice(body: ChatBody) -> str:
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return choice.function.name
    return choice or "auto"


def _reasoning(body: ChatBody) -> bool | None:
    """Whether to think: said outright, or by an effort, of which only none at all is different."""
    if body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking is not None:
        return body.chat_template_kwargs.enable_thinking
    return None if body.reasoning_effort is None else body.reasoning_effort != "none"
