"""The full-screen chat over a fake backend, its chats on the disk: `python -m tests.chat.session [held|drawing]`.

Answers are ANSWERED; with `held` they never come to their end; with `drawing` they go on and on, and SIGHUP is ignored.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from edge_llm_chat.backend import Ask
from edge_llm_chat.store import Store

from tests.chat.conftest import app_of
from tests.chat.fakes import FakeAnswering, FakeBackend, answer_of


class HeldBackend(FakeBackend):
    async def answer(self, ask: Ask) -> FakeAnswering:
        answering = await super().answer(ask)
        answering.step(2)  # the prompt is read, and the first word is said
        return answering


class DrawingBackend(FakeBackend):
    async def answer(self, ask: Ask) -> FakeAnswering:
        answering = await super().answer(ask)
        self._stepping = asyncio.create_task(self._step(answering))
        return answering

    async def _step(self, answering: FakeAnswering) -> None:
        while True:
            answering.step()
            await asyncio.sleep(0.01)


def backend_of(manner: str) -> FakeBackend:
    if manner == "held":
        return HeldBackend("ANSWERED and more", held=True)
    if manner == "drawing":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return DrawingBackend(answer_of([f"word {number}\n\n" for number in range(20_000)]), held=True)
    return FakeBackend("ANSWERED")


if __name__ == "__main__":
    backend = backend_of("".join(sys.argv[1:]))
    app = app_of(backend, Store.open())
    app.run()
    sys.exit(app.return_code)
