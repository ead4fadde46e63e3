"""The full-screen chat over a fake backend, its chats on the disk: `python -m tests.chat.session [held]`.

Answers are ANSWERED; with `held` they never come to their end.
"""

from __future__ import annotations

import sys

from edge_llm_chat.backend import Ask
from edge_llm_chat.store import Store

from tests.chat.conftest import app_of
from tests.chat.fakes import FakeAnswering, FakeBackend


class HeldBackend(FakeBackend):
    async def answer(self, ask: Ask) -> FakeAnswering:
        answering = await super().answer(ask)
        answering.step(2)  # the prompt is read, and the first word is said
        return answering


if __name__ == "__main__":
    held = "held" in sys.argv
    backend = HeldBackend("ANSWERED and more", held=True) if held else FakeBackend("ANSWERED")
    app = app_of(backend, Store.open())
    app.run()
    sys.exit(app.return_code)
