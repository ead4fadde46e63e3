"""Tooling: what a model's manifest says about tool calls and reasoning, applied to one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from edge_llm.engine.request import Request
from edge_llm.engine.stream import AnswerReaders
from edge_llm.engine.tool_grammar import tool_grammar
from edge_llm.errors import ModelFormatError
from edge_llm.messages import Message, Role, Tool
from edge_llm.model.manifest import ModelManifest
from edge_llm.sampling.decoders import Trigger
from edge_llm.sampling.grammar import Grammar
from edge_llm.text.channels import ChannelSplitter, ReasoningMarkers
from edge_llm.text.prompt import RenderedPrompt
from edge_llm.text.tool_calls import MAX_CALLS, ToolCallParser
from edge_llm.text.tool_prompt import definitions, told_in_words
from edge_llm.text.tool_syntax import GENERIC, ToolSyntax

if TYPE_CHECKING:
    from edge_llm.text.chat_template import ChatTemplate

_SWITCHES = ("enable_thinking", "thinking")
"""variables by which templates turn reasoning on and off"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the template is given. `places[i]` is the index of the message that shows the request's message i."""

    messages: tuple[Message, ...]
    places: tuple[int, ...]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


class Tooling:
    """One a model. `added` are the ids of its tokenizer's markers."""

    def __init__(self, syntax: ToolSyntax | None, markers: ReasoningMarkers | None, added: Mapping[str, int]) -> None:
        """`syntax` is None for a model whose template takes no tools, or none that we know: they are told in words."""
        self._native = syntax
        self.syntax = syntax or GENERIC
        self._markers = markers
        texts = (self.syntax.begin, self.syntax.end, *((markers.begin, markers.end) if markers else ()))
        self.marker_ids = {text: added[text] for text in texts if text in added}
        """ids of the markers that are tokens of their own"""

    @classmethod
    def of(cls, manifest: ModelManifest, added: Mapping[str, int]) -> Self:
        """Raises `ModelFormatError` for markers that cannot be."""
        try:
            return cls(ToolSyntax.of(manifest.tool_calls), ReasoningMarkers.of(manifest.reasoning), added)
        except (TypeError, ValueError) as error:
            raise ModelFormatError(
                f"manifest.json: tool_calls, reasoning: {error}", hint="import the model again"
            ) from None

    def conversation(self, request: Request, manifest: ModelManifest, template: ChatTemplate) -> Conversation:
        """The request's messages and tools, opened by the model's own system prompt if it has none."""
        assert request.messages is not None
        messages = list(request.messages)
        opened = manifest.system_prompt is not None and all(m.role is not Role.SYSTEM for m in messages)
        if opened:
            messages.insert(0, Message.system(manifest.system_prompt or ""))
        tools = offered(request)
        variables = dict(manifest.template_kwargs)
        if request.reasoning is not None:
            variables |= {name: request.reasoning for name in _SWITCHES if template.reads(name)}
        if self._native is None:
            messages, places = told_in_words(messages, tools)
            return Conversation(tuple(messages), tuple(places[opened:]), None, variables)
        described = definitions(tools) if tools else None
        return Conversation(tuple(messages), tuple(range(opened, len(messages))), described, variables)

    def readers(self, request: Request, prompt: RenderedPrompt) -> AnswerReaders:
        """What reads the answer to this prompt."""
        tools = offered(request)
        reasoning = None
        if self._markers is not None:
            reasoning = ChannelSplitter(self._markers, is_open=self._markers.open_in(prompt))
        calls = ToolCallParser(self.syntax, [tool.name for tool in tools]) if tools else None
        several = request.parallel_tool_calls and request.tool_choice in ("auto", "required")
        seen = [self._markers.begin, self._markers.end] if self._markers else []
        seen += [self.syntax.begin, self.syntax.end] if tools else []
        shown = frozenset(self.marker_ids[text] for text in seen if text in self.marker_ids)
        return AnswerReaders(reasoning, calls, shown, MAX_CALLS if several else 1)

    def grammar(self, request: Request) -> Grammar | None:
        """What a forced answer, or a call that the model has begun, must look like; None if nothing rules them.

        Raises `ParameterError` for schemas that no grammar can hold.
        """
        tools = offered(request)
        if not tools or not (forces_calls(request) or self.syntax.begin):
            return None
        if not forces_calls(request):
            return tool_grammar(tools, self.syntax, self.marker_ids, several=False)
        named = tuple(tool for tool in tools if tool.name == request.tool_choice)
        several = request.parallel_tool_calls and not named
        return tool_grammar(named or tools, self.syntax, self.marker_ids, several=several)

    def trigger(self, request: Request, prompt: RenderedPrompt | None) -> Trigger | None:
        """Where in the answer its grammar begins; None: at its beginning."""
        if request.response_format is None and not forces_calls(request):
            return self._trigger(self.syntax.begin, in_grammar=True)
        if prompt is not None and self._markers is not None and self._markers.open_in(prompt):
            return self._trigger(self._markers.end, in_grammar=False)
        return None

    def _trigger(self, text: str, *, in_grammar: bool) -> Trigger:
        return Trigger(text.encode(), self.marker_ids.get(text), in_grammar)


def forces_calls(request: Request) -> bool:
    return bool(request.tools) and request.tool_choice not in ("none", "auto")


def offered(request: Request) -> tuple[Tool, ...]:
    """The tools that the model is told of."""
    return () if request.tool_choice == "none" else request.tools
