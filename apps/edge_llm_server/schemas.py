"""What clients send, as pydantic models: types and sizes. Ranges are checked by `SamplingParams` and `Request`.

Strict: a bool is no number and a text is no bool. Fields that nobody knows are ignored, as OpenAI's clients expect, unless
they would change the answer: those in `refused.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CHOICES = 8
MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_TEXT = 8 << 20
MAX_PROMPTS = 128
MAX_PARTS = 256

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Word = Annotated[str, Field(max_length=256)]
Number = float
Stops = Annotated[str, Field(max_length=256)] | Annotated[list[str], Field(max_length=16)]


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """llama-server's way to give one"""


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class Generation(Body):
    """How an answer is made: what all bodies of OpenAI's kind share, with llama-server's and vLLM's extensions."""

    model: Word | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    seed: int | None = None
    stop: Stops | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    top_n_sigma: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    repeat_penalty: Number | None = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=32)] | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: Text | None = None
    regex: Text | None = None
    choices: Annotated[list[Word], Field(min_length=1, max_length=2048)] | None = None
    """labels, of which the most probable is the answer; nothing is sampled"""
    cache_prompt: bool | None = None
    truncation: Literal["auto", "slide", "disabled", "error"] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "batch"] | None = None


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text


class OtherPart(Body):
    """An image, a sound, a file: refused by name."""

    type: Word


class FunctionCall(Body):
    name: Word
    arguments: Text


class MessageToolCall(Body):
    id: Word
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart | RefusalPart | OtherPart], Field(max_length=MAX_PARTS)] | None = None
    name: Word | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Word | None = None
    refusal: Text | None = None


class FunctionSpec(Body):
    name: Word
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    name: Word


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class TemplateArguments(Body):
    """The one switch of templates that callers may set; anything else is not theirs to change."""

    model_config = ConfigDict(extra="forbid")
    enable_thinking: bool | None = None


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None


Ids = Annotated[list[int], Field(min_length=1, max_length=1 << 20)]


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: of a text (`content` is llama-server's word for it, `prompt` vLLM's) or of messages."""

    model: Word | None = None
    content: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Word | None = None
    tokens: Annotated[list[int], Field(max_length=1 << 20)]
