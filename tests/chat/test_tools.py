"""Tools in the chat: shown whole, asked for, run, and told to the model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence

import pytest
from edge_llm_chat.screens.approval import ApprovalScreen
from edge_llm_chat.store import Store

from edge_llm.messages import Event, FinishReason, Message, Role, TextDelta, ToolCall, ToolCallDelta
from tests.chat.conftest import app_of, chat, say, screen_of, settle, shown, texts, wait_until
from tests.chat.fakes import FakeBackend, answer_of, finished
from tests.cli.test_terminal import FOREIGN


def calls(*arguments: str, name: str = "calculator", text: str = "") -> list[Event]:
    """An answer that asks for these calls."""
    made = tuple(ToolCall(f"call-{i}", name, one) for i, one in enumerate(arguments))
    deltas = [ToolCallDelta(i, one.arguments, one.id, one.name) for i, one in enumerate(made)]
    said = [TextDelta(text)] if text else []
    return [*said, *deltas, finished(FinishReason.TOOL_CALLS, tool_calls=made)]


SUM = '{"expression": "2 + 3"}'


def run(backend: FakeBackend, keys: Sequence[str], store: Store | None = None) -> tuple[list[str], str]:
    """Ask, answer each question about a tool with the next key; gives the messages and the screen at the end."""
    result: list[str] = []
    screens: list[str] = []

    async def body() -> None:
        async with chat(app_of(backend, store, tools=("calculator",)), (90, 40)) as pilot:
            await settle(pilot)
            screen_of(pilot).composer.insert("add them")
            await pilot.press("enter")
            for key in keys:
                await wait_until(lambda: isinstance(pilot.app.screen, ApprovalScreen), pilot, "a question")
                await pilot.pause()
                screens.append(shown(pilot))
                await pilot.press(key)
                await pilot.pause()
            await settle(pilot)
            result.extend(texts(pilot))
            screens.append(shown(pilot))

    asyncio.run(body())
    return result, "\n".join(screens)


def test_a_call_is_asked_for_run_and_answered() -> None:
    store, backend = Store(None), FakeBackend(calls(SUM, text="Let me see."), "It is 5.")
    messages, screen = run(backend, ["y"], store)
    assert messages == ["add them", "Let me see.", "5", "It is 5."]
    for part in (
        "The model asks to run a tool",
        SUM,
        "calculator",
        "Compute an arithmetic",
        "It changes nothing",
        "⚙ calculator says",
    ):
        assert part in screen
    assert backend.asked[0].tools[0].name == "calculator"
    last = backend.asked[1].messages
    assert last[1].tool_calls == (ToolCall("call-0", "calculator", SUM),)
    assert last[2] == Message(Role.TOOL, "5", name="calculator", tool_call_id="call-0")
    assert [turn.message() for turn in store.load(store.last()).path()][:3] == list(last)


def test_a_small_window_shows_the_call_and_its_keys() -> None:
    async def body() -> None:
        async with chat(app_of(FakeBackend(calls(SUM), "Done."), tools=("calculator",)), (40, 12)) as pilot:
            await settle(pilot)
            screen_of(pilot).composer.insert("add them")
            await pilot.press("enter")
            await wait_until(lambda: isinstance(pilot.app.screen, ApprovalScreen), pilot)
            await pilot.pause()
            for part in ("calculator", "It changes nothing", SUM, "y once · c chat · n no · v never"):
                assert part in shown(pilot)
            await pilot.press("n")
            await settle(pilot)

    asyncio.run(body())


def test_a_call_that_is_longer_than_the_window_can_be_read_to_its_end() -> None:
    long = json.dumps({"expression": "1 + " * 45 + "987654"})

    async def body() -> None:
        async with chat(app_of(FakeBackend(calls(long), "Done."), tools=("calculator",)), (40, 12)) as pilot:
            await settle(pilot)
            screen_of(pilot).composer.insert("add them")
            await pilot.press("enter")
            await wait_until(lambda: isinstance(pilot.app.screen, ApprovalScreen), pilot)
            await pilot.pause()
            assert "987654" not in shown(pilot)
            await pilot.press("end")
            await wait_until(lambda: "987654" in shown(pilot), pilot)
            await pilot.press("n")
            await settle(pilot)

    asyncio.run(body())


@pytest.mark.parametrize("key", ["n", "enter"])
def test_no_is_told_to_the_model_and_asked_again_next_time(key: str) -> None:
    backend = FakeBackend(calls(SUM), calls(SUM), "Never mind.")
    messages, _ = run(backend, [key, key])
    refused = "error: the user did not allow this call"
    assert messages == ["add them", "", refused, "", refused, "Never mind."]


@pytest.mark.parametrize(("key", "said"), [("c", "5"), ("v", "error: the user did not allow this call")])
def test_an_answer_for_the_whole_chat_is_asked_for_once(key: str, said: str) -> None:
    backend = FakeBackend(calls(SUM), calls(SUM, SUM), "Done.")
    messages, _ = run(backend, [key])
    assert messages == ["add them", "", said, "", said, said, "Done."]


def test_a_model_that_calls_for_ever_has_to_answer_in_words_at_last() -> None:
    backend = FakeBackend(calls(SUM))
    run(backend, ["c"])
    assert [ask.tool_choice for ask in backend.asked] == ["auto"] * 8 + ["none"]


def test_what_is_shown_of_a_call_is_harmless_and_whole() -> None:
    hostile = '{"expression": "\\u001b]0;x\\u0007\\u202e1 + 1"}'
    _, screen = run(FakeBackend(calls(hostile), "Done."), ["n"])
    assert "\\u001b]0;x\\u0007\\u202e1 + 1" in screen
    assert not FOREIGN.search(screen)


def test_stopping_ends_the_calls() -> None:
    backend = FakeBackend(calls(SUM), answer_of("should not come"))

    async def body() -> None:
        async with chat(app_of(backend, tools=("calculator",))) as pilot:
            await settle(pilot)
            screen_of(pilot).composer.insert("add them")
            await pilot.press("enter")
            await wait_until(lambda: isinstance(pilot.app.screen, ApprovalScreen), pilot)
            await pilot.press("escape")
            await settle(pilot)
            assert len(backend.asked) == 1
            assert texts(pilot)[-1] == "error: the user did not allow this call"
            await say(pilot, "/tools off")
            await say(pilot, "go on")
            assert backend.asked[1].tools == ()

    asyncio.run(body())


def test_leaving_while_a_tool_is_asked_for() -> None:
    async def body() -> None:
        app = app_of(FakeBackend(calls(SUM)), tools=("calculator",))
        async with chat(app) as pilot:
            await settle(pilot)
            screen_of(pilot).composer.insert("add them")
            await pilot.press("enter")
            await wait_until(lambda: isinstance(app.screen, ApprovalScreen), pilot)
            await pilot.press("ctrl+q")
        assert app.return_code == 0
        for thread in threading.enumerate():
            if thread.name == "edge-llm aside":
                thread.join(20)
                assert not thread.is_alive(), "the thread of the tool does not wait for ever"

    asyncio.run(asyncio.wait_for(body(), 60))
