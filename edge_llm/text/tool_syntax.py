"""How a model writes tool calls: a declaration, kept in its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

MAX_MARKER = 64


class CallForm(StrEnum):
    JSON = "json"
    """an object with name and arguments, or a list of such objects"""
    PYTHONIC = "pythonic"
    """a list of Python calls with keyword arguments: [weather(city="Paris")]"""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Calls stand between `begin` and `end`. Without `begin` an answer that starts as calls do is calls; without `end` they
    end where their brackets close. `arguments` is the key of the arguments in JSON.

    Raises `ValueError` for what cannot be.
    """

    form: CallForm = CallForm.JSON
    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    arguments: str = "arguments"

    def __post_init__(self) -> None:
        CallForm(self.form)
        for text in (self.begin, self.end, self.arguments):
            if not isinstance(text, str) or len(text) > MAX_MARKER or text != text.strip():
                raise ValueError("a marker of tool calls is a short text")
        if not self.arguments or (self.end and not self.begin):
            raise ValueError("tool calls need a name for their arguments, and a beginning if they have an end")

    @classmethod
    def of(cls, spec: Mapping[str, str]) -> Self | None:
        """The syntax of a manifest; None if it names none."""
        form = CallForm(spec.get("form", CallForm.JSON))
        others = {name: text for name, text in spec.items() if name != "form"}
        return cls(form, **others) if spec else None

    @classmethod
    def detect(cls, template: str) -> Self | None:
        """The syntax that a chat template writes calls in; None if it takes no tools, or writes them in a way not known here."""
        if "tools" not in template or any(other in template for other in _NOT_KNOWN):
            return None
        return next((cls(*syntax) for sign, syntax in _SIGNS if sign in template), None)


_NOT_KNOWN = ("<arg_key>", "<function=", "[ARGS]")
"""signs of calls in tags of their own"""

_SIGNS: tuple[tuple[str, tuple[CallForm, str, str, str]], ...] = (
    ("<|tool_call_start|>", (CallForm.PYTHONIC, "<|tool_call_start|>", "<|tool_call_end|>", "arguments")),
    ("[TOOL_CALLS]", (CallForm.JSON, "[TOOL_CALLS]", "", "arguments")),
    ("<tool_call>", (CallForm.JSON, "<tool_call>", "</tool_call>", "arguments")),
    ("<|tool_call|>", (CallForm.JSON, "<|tool_call|>", "", "arguments")),
    ('"parameters": ', (CallForm.JSON, "", "", "parameters")),
)
"""what a template holds, and the syntax that it means: Hermes and Qwen, Mistral, LFM2, Granite, Llama 3"""

GENERIC = ToolSyntax()
"""what a model is told to write whose template knows no tools"""
