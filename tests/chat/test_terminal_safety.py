"""F26 through the app: whatever a model, a file, a name or an error says, the screen gets text and no commands."""

from __future__ import annotations

import asyncio
import random

import pytest
from edge_llm_chat.conversation import Attachment, Conversation, Facts, State, Turn
from edge_llm_chat.store import Store
from textual import events
from textual.pilot import Pilot

from edge_llm.errors import GenerationError
from edge_llm.messages import ReasoningDelta, Role, TextDelta
from tests.chat.conftest import app_of, chat, say, screen_of, settle, wait_until
from tests.chat.fakes import FakeBackend, answer_of, finished
from tests.cli.test_terminal import FOREIGN, PAYLOADS

EVERYTHING = " ".join(PAYLOADS).replace("\ud800", "")


def check(pilot: Pilot[None]) -> None:
    """Nothing foreign in any cell, and no link but as text."""
    for strip in pilot.app.screen._compositor.render_strips(pilot.app.size):
        for segment in strip:
            assert not FOREIGN.search(segment.text), ascii(segment.text)
            assert "\n" not in segment.text
            assert segment.style is None or segment.style.link is None


@pytest.mark.parametrize("payload", PAYLOADS, ids=ascii)
def test_a_hostile_answer(payload: str) -> None:
    async def body() -> None:
        said = f"a {payload} b\n\n`{payload}` [{payload}](http://x/{payload})\n\n```{payload}\n{payload}\n```\n"
        script = [ReasoningDelta(f"hm {payload}"), *(TextDelta(character) for character in said), finished()]
        async with chat(FakeBackend(script, name=f"model {payload}"), (80, 30)) as pilot:
            await say(pilot, f"question {payload}")
            check(pilot)
            screen_of(pilot).transcript.views[-1].focus()
            await pilot.press("t")
            check(pilot)
            # what is kept is what was said
            assert screen_of(pilot).conversation.path()[-1].content == said.replace("\ud800", "?")

    asyncio.run(body())


def test_hostile_errors_titles_tags_and_files() -> None:
    async def body() -> None:
        conversation = Conversation(title=EVERYTHING, tags=(EVERYTHING,), system=EVERYTHING, model=EVERYTHING)
        file = Attachment(EVERYTHING, EVERYTHING)
        conversation.turns[1] = Turn(1, None, Role.USER, EVERYTHING, attachments=(file,))
        facts = Facts(note=EVERYTHING)
        conversation.turns[2] = Turn(2, 1, Role.ASSISTANT, EVERYTHING, State.FAILED, EVERYTHING, facts=facts)
        conversation.shown |= {None: 1, 1: 2}
        store = Store(None)
        for turn in conversation.turns.values():
            store.save_turn(conversation, turn)
        backend = FakeBackend([GenerationError(EVERYTHING, hint=EVERYTHING)])
        async with chat(app_of(backend, store, conversation=conversation.id), (100, 40)) as pilot:
            await settle(pilot)
            check(pilot)
            await say(pilot, "again")
            await wait_until(lambda: screen_of(pilot).query(".notice"), pilot)
            await pilot.pause()
            check(pilot)
            screen_of(pilot).report(GenerationError(EVERYTHING, hint=EVERYTHING))
            await wait_until(lambda: pilot.app.screen.query("Toast"), pilot)
            await pilot.pause()
            check(pilot)

    asyncio.run(body())


def test_what_is_pasted_is_shown_harmless() -> None:
    async def body() -> None:
        async with chat(FakeBackend()) as pilot:
            await settle(pilot)
            pilot.app.post_message(events.Paste(EVERYTHING))
            await wait_until(lambda: screen_of(pilot).composer.text, pilot)
            await pilot.pause()
            check(pilot)

    asyncio.run(body())


def test_random_answers() -> None:
    seeded = random.Random(5)
    marks = [*"abc *_`#[]()|>-\n", *PAYLOADS, "&#27;", "&#155;", "\x9d", "\x1b]8;;x\x07"]
    said = "".join(seeded.choice(marks) for _ in range(3_000))

    async def body() -> None:
        script = answer_of([said[start : start + 3] for start in range(0, len(said), 3)])
        async with chat(FakeBackend(script), (80, 200)) as pilot:
            await say(pilot, "go")
            check(pilot)

    asyncio.run(body())
