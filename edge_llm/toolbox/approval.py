"""What somebody is asked before a tool runs, and what they may answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from edge_llm.messages import Tool
from edge_llm.text.terminal import clean


class Permission(StrEnum):
    """What a tool may do, at worst."""

    READ = "read"
    """look at things, and change none"""
    WRITE = "write"
    """change things"""
    EXEC = "exec"
    """start programs, reach other machines"""

    @property
    def sentence(self) -> str:
        """What whoever is asked is told of it."""
        return _SENTENCES[self]


_SENTENCES = {
    Permission.READ: "It changes nothing.",
    Permission.WRITE: "It may change things.",
    Permission.EXEC: "It may start programs and reach other machines.",
}


class Decision(StrEnum):
    ONCE = "once"
    CHAT = "chat"
    """and for the rest of this chat: a reading tool with any arguments, another with these"""
    NEVER = "never"
    """no, for the rest of this chat"""
    NO = "no"


@dataclass(frozen=True, slots=True)
class Approval:
    """A question. `arguments` are shown in full: JSON in which no character hides, moves or reorders others."""

    tool: Tool
    permission: Permission
    arguments: str
    changed: bool
    """the tool is described otherwise than when it was approved"""


Approver = Callable[[Approval], Decision]


def pin(tool: Tool) -> str:
    """SHA-256 of all that a model and a user are told of a tool, in hex."""
    told = json.dumps([tool.name, tool.description, tool.parameters])
    return hashlib.sha256(told.encode()).hexdigest()


def shown_arguments(arguments: str) -> str:
    """The JSON text of arguments for somebody to judge: whole, and with escapes for what a terminal would not show."""
    text = json.dumps(json.loads(arguments), ensure_ascii=False)
    return "".join(character if clean(character) == character else _escape(character) for character in text)


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1]
