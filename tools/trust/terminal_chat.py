"""The full-screen chat, answering from a file: `python -m tools.trust.terminal_chat FILE`, a list of answers.

Each is {question, model, reasoning, pieces, error}, in a conversation of its own; with an error it ends by that.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_llm_chat.app import ChatApp
from edge_llm_chat.conversation import Conversation
from edge_llm_chat.screens.chat import ChatScreen
from edge_llm_chat.store import Store

from edge_llm.errors import EdgeLLMError, GenerationError
from edge_llm.messages import Event, ReasoningDelta, TextDelta
from tests.chat.fakes import FakeBackend, finished

_PAINTED_S = 0.04
"""more than a frame"""


def script(answer: dict[str, Any]) -> Sequence[Event | EdgeLLMError]:
    thoughts = [ReasoningDelta(answer["reasoning"])] if answer["reasoning"] else []
    error = answer["error"]
    end = finished() if error is None else GenerationError(error, hint=error)
    return [*thoughts, *map(TextDelta, answer["pieces"]), end]


async def played(answers: list[dict[str, Any]]) -> None:
    backend = FakeBackend(*map(script, answers), name=answers[0]["model"])
    app = ChatApp(backend, Store(None))

    async def act() -> None:
        while not app.screen_stack or not isinstance(app.screen, ChatScreen) or app.screen.model is None:
            await asyncio.sleep(0.02)
        screen = app.screen
        for answer in answers:
            await screen._open(Conversation(title=answer["model"], tags=(answer["model"],)))
            await screen.ask(answer["question"])
            while screen.busy:
                await asyncio.sleep(0.01)
            for view in screen.transcript.views[-1:]:
                view.focus()
                app.simulate_key("t")  # what it thought, too
            await asyncio.sleep(_PAINTED_S)

    acting = asyncio.create_task(act())
    acting.add_done_callback(lambda _: app.exit())
    await app.run_async()
    await acting


if __name__ == "__main__":
    asyncio.run(played(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
