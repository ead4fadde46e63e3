"""The process of one tab: the chat itself, asking the server that all tabs share."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from edge_llm import machine
from edge_llm.engine.child_process import clean_environment
from edge_llm.errors import EdgeLLMError
from edge_llm_chat.backend import ChatBackend
from edge_llm_chat.http_backend import HttpBackend
from edge_llm_chat.launch import Wish, open_chat
from edge_llm_chat.web.processes import python_command

_VARIABLE = "CHAT_TAB"


@dataclasses.dataclass(frozen=True, slots=True)
class Tab:
    """What the chat in a tab has to know."""

    wish: Wish
    private: bool
    slides: bool
    url: str
    socket: Path | None = None
    """of a server on this machine, that answers in the place of the url"""
    model: str | None = None
    key: str | None = None

    def command(self) -> list[str]:
        return python_command("from edge_llm_chat.web.tab import main; main()")

    def environment(self) -> dict[str, str]:
        """What a chat needs of ours; unlike a command line, it can be seen by its owner only."""
        return clean_environment() | {_VARIABLE: json.dumps(dataclasses.asdict(self), default=str)}

    def connect(self, model: str | None) -> ChatBackend:
        name = "your server" if self.socket else ""
        return HttpBackend(self.url, model=model, key=self.key, socket=self.socket, name=name, slides=self.slides)

    @classmethod
    def read(cls, text: str) -> Tab:
        values: dict[str, Any] = json.loads(text)
        wish, socket = values.pop("wish"), values.pop("socket")
        wish["tools"] = tuple(wish["tools"])
        return cls(Wish(**wish), socket=None if socket is None else Path(socket), **values)


def main() -> None:
    """The process; how it ended is told by its exit code, and by one line on stderr."""
    machine.end_with_parent(at_once=False)  # what is half said is kept; TabDriver does not wait long for that
    tab = Tab.read(os.environ.pop(_VARIABLE))
    try:
        open_chat(tab.connect, tab.model, tab.wish, private=tab.private)
    except EdgeLLMError as error:
        print(f"error: {error}" + (f"\n{error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(2)
