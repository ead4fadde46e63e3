"""Every key and command, over the fake backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from edge_llm_chat import clipboard, parameters
from edge_llm_chat.app import ChatApp
from edge_llm_chat.backend import Ask, ModelChoice
from edge_llm_chat.commands import COMMANDS
from edge_llm_chat.conversation import Conversation, Facts
from edge_llm_chat.models import with_speeds
from edge_llm_chat.screens.chat import ChatScreen
from edge_llm_chat.screens.dialogs import ConfirmScreen, LineScreen, PickScreen, TextScreen
from edge_llm_chat.screens.help import HelpScreen
from edge_llm_chat.screens.history import HistoryScreen
from edge_llm_chat.screens.inspector import InspectorScreen
from edge_llm_chat.screens.settings import SettingsScreen
from edge_llm_chat.store import Store
from edge_llm_cli.main import application
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, TextArea
from typer.testing import CliRunner

from edge_llm.messages import Message, Role
from edge_llm.sampling.params import USUAL_MAX_TOKENS
from tests.chat.conftest import app_of, chat, say, screen_of, settle, shown, texts, wait_until
from tests.chat.fakes import FakeAnswering, FakeBackend, answer_of, info

CODE = "Look:\n\n```python\nprint(1)\n```\n"


def run(
    body: Callable[[Pilot[None]], Awaitable[None]], app: ChatApp | FakeBackend, size: tuple[int, int] = (80, 24)
) -> None:
    async def main() -> None:
        async with chat(app, size) as pilot:
            await settle(pilot)
            await body(pilot)

    asyncio.run(main())


async def command(pilot: Pilot[None], line: str) -> None:
    """Write it, all at once, and press Enter."""
    screen_of(pilot).composer.insert(line)
    await pilot.press("enter")
    await pilot.pause()


async def dialog(pilot: Pilot[None], kind: type) -> None:
    await wait_until(lambda: isinstance(pilot.app.screen, kind), pilot, kind.__name__)
    await pilot.pause()


async def closed(pilot: Pilot[None]) -> None:
    await wait_until(lambda: isinstance(pilot.app.screen, ChatScreen), pilot)
    await pilot.pause()


def test_a_model_that_does_not_run_as_asked_says_so() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await wait_until(lambda: "the CPU computes" in shown(pilot), pilot)
        pilot.app.clear_notifications()
        await say(pilot, "Hi")  # what was said once is not said again
        assert "the CPU computes" not in shown(pilot)
        backend.told = "a fallback answers"  # and what is new since then is
        await say(pilot, "Hi")
        await wait_until(lambda: "a fallback answers" in shown(pilot), pilot)

    backend = FakeBackend("a", notice="the CPU computes")
    run(body, backend)


# --- answers and branches ---


@pytest.mark.parametrize("way", ["ctrl+r", "/retry", "on the answer", "on the question"])
def test_an_answer_again_is_a_version_beside_the_first(way: str) -> None:
    backend = FakeBackend("first", "second")

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "Hi")
        if way == "ctrl+r":
            await pilot.press("ctrl+r")
        elif way == "/retry":
            await command(pilot, way)
        else:
            await pilot.press("shift+tab", *([] if way == "on the answer" else ["up"]), "r")
        await settle(pilot)
        assert texts(pilot) == ["Hi", "second"]
        assert "‹ 2/2 ›" in shown(pilot)
        await pilot.press(*(["shift+tab"] if pilot.app.focused is screen_of(pilot).composer else ["down"]))
        await pilot.press("left")
        await pilot.pause()
        assert texts(pilot) == ["Hi", "first"]
        assert "‹ 1/2 ›" in shown(pilot)
        await pilot.press("left", "right")
        await pilot.pause()
        assert texts(pilot) == ["Hi", "second"]
        assert backend.asked[1].messages == (Message.user("Hi"),)

    run(body, backend)


def test_asking_again_in_the_middle_keeps_what_followed_aside() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "one")
        await say(pilot, "two")
        await pilot.press("shift+tab", "up", "up", "r")
        await settle(pilot)
        assert texts(pilot) == ["one", "c"]
        screen_of(pilot).transcript.views[1].focus()
        await pilot.press("[")
        await pilot.pause()
        assert texts(pilot) == ["one", "a", "two", "b"]

    run(body, FakeBackend("a", "b", "c"))


@pytest.mark.parametrize("way", ["up", "/edit", "e"])
def test_editing_a_question_asks_anew_beside_it(way: str) -> None:
    backend = FakeBackend("a", "b")

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "one")
        if way == "/edit":
            await command(pilot, way)
        else:
            await pilot.press(*(["up"] if way == "up" else ["shift+tab", "e"]))
        await pilot.pause()
        assert screen_of(pilot).composer.text == "one"
        assert "editing" in shown(pilot)
        await say(pilot, " more")
        assert texts(pilot) == ["one more", "b"]
        assert "‹ 2/2 ›" in shown(pilot)
        assert backend.asked[1].messages == (Message.user("one more"),)

    run(body, backend)


def test_escape_leaves_an_edit() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "one")
        await pilot.press("up", "escape")
        await say(pilot, "two")
        assert texts(pilot) == ["one", "a", "two", "a"]

    run(body, FakeBackend("a"))


def test_a_fixed_seed_counts_versions() -> None:
    backend = FakeBackend("a")

    async def body(pilot: Pilot[None]) -> None:
        await command(pilot, "/set seed 5")
        await say(pilot, "one")
        await pilot.press("ctrl+r")
        await settle(pilot)
        await say(pilot, "two")
        assert [ask.params.seed for ask in backend.asked] == [5, 6, 5]

    run(body, backend)


def test_deleting_a_message_deletes_what_follows() -> None:
    store = Store(None)

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "one")
        await say(pilot, "two")
        await pilot.press("shift+tab", "up", "d")
        await dialog(pilot, ConfirmScreen)
        await pilot.press("enter")  # no, by habit
        await closed(pilot)
        assert len(texts(pilot)) == 4
        await pilot.press("d")
        await dialog(pilot, ConfirmScreen)
        await pilot.press("y")
        await closed(pilot)
        assert texts(pilot) == ["one", "a"]
        assert len(store.load(store.last()).turns) == 2

    run(body, app_of(FakeBackend("a"), store))


def test_nothing_is_branched_while_an_answer_comes() -> None:
    backend = FakeBackend("a", answer_of("slow answer"))

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "one")
        backend._held = True
        await pilot.press(*"two", "enter")
        await wait_until(lambda: len(backend.answers) == 2, pilot)
        for keys in (["ctrl+r"], ["ctrl+n"], ["ctrl+o"], ["shift+tab", "up", "up", "e"], ["r"], ["d"], ["left"]):
            await pilot.press(*keys)
            await pilot.pause()
            assert isinstance(pilot.app.screen, ChatScreen)
        screen_of(pilot).composer.focus()
        await pilot.press(*"three", "enter")
        assert screen_of(pilot).composer.text == "three", "what was written is kept"
        backend.answers[1].release()
        await settle(pilot)
        assert texts(pilot) == ["one", "a", "two", "slow answer"]

    run(body, backend)


# --- copying ---


@pytest.mark.parametrize(
    ("keys", "copied"),
    [
        (["ctrl+y"], CODE),
        ([*"/copy", "enter"], CODE),
        ([*"/code", "enter"], "print(1)\n"),
        (["shift+tab", "c"], CODE),
        (["shift+tab", "y"], "print(1)\n"),
        (["shift+tab", "up", "c"], "Hi"),
    ],
)
def test_copying(keys: list[str], copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locally: list[str] = []
    monkeypatch.setattr("edge_llm_chat.app.copy_locally", locally.append)

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "Hi")
        await pilot.press(*keys)
        await wait_until(lambda: locally, pilot)
        assert pilot.app.clipboard == copied
        assert locally == [copied]

    run(body, FakeBackend(CODE))


def test_the_desktop_is_told_by_its_own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAYLAND_DISPLAY", "DISPLAY", "WSL_DISTRO_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    clipboard.copy_locally("nobody hears this")
    program = tmp_path / "wl-copy"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    clipboard.copy_locally("déjà vu")
    assert (tmp_path / "copied").read_text("utf-8") == "déjà vu"


# --- chats ---


def test_new_chats_and_the_list_of_them() -> None:
    store = Store(None)

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "about cats")
        await pilot.press("ctrl+n")
        await pilot.pause()
        assert texts(pilot) == []
        await say(pilot, "about dogs")
        await pilot.press("ctrl+o")
        await dialog(pilot, HistoryScreen)
        assert "about cats" in shown(pilot)
        await pilot.press(*"cats")
        await pilot.pause()
        assert pilot.app.screen.query_one(OptionList).option_count == 1
        await pilot.press("enter")
        await closed(pilot)
        assert texts(pilot) == ["about cats", "a"]

    run(body, app_of(FakeBackend("a"), store))


def test_chats_are_changed_in_the_list() -> None:
    store = Store(None)

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "about cats")
        await pilot.press("ctrl+n")
        await say(pilot, "about dogs")
        await pilot.press("ctrl+o")
        await dialog(pilot, HistoryScreen)
        await pilot.press("down", "f2")
        await dialog(pilot, LineScreen)
        pilot.app.screen.query_one(Input).value = " felines "
        await pilot.press("enter")
        await dialog(pilot, HistoryScreen)
        await pilot.press("ctrl+t")
        await dialog(pilot, LineScreen)
        await pilot.press(*"#pets x", "enter")
        await dialog(pilot, HistoryScreen)
        await pilot.press("ctrl+b")
        await pilot.pause()
        first = store.find()[0]
        assert (first.title, first.tags, first.pinned) == ("felines", ("pets", "x"), True)
        await pilot.press("ctrl+d")
        await dialog(pilot, ConfirmScreen)
        await pilot.press("y")
        await dialog(pilot, HistoryScreen)
        await pilot.press("ctrl+d")  # the one that is open stays
        await pilot.pause()
        assert isinstance(pilot.app.screen, HistoryScreen)
        await pilot.press("escape")
        await closed(pilot)
        assert [summary.title for summary in store.find()] == ["about dogs"]

    run(body, app_of(FakeBackend("a"), store))


def test_commands_for_the_chat_that_is_open(tmp_path: Path) -> None:
    store = Store(None)

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "about cats")
        await command(pilot, "/title Felines")
        await command(pilot, "/tag pets home")
        await command(pilot, "/pin")
        assert "Felines  pinned  #pets  #home" in shown(pilot)
        await command(pilot, f"/export {tmp_path}/out.md")
        await command(pilot, f"/export {tmp_path}/out.json")
        await command(pilot, f"/export {tmp_path}/out.md")
        told = pilot.app._notifications
        await wait_until(lambda: any("cannot be written: File exists" in one.message for one in told), pilot)
        await command(pilot, "/delete")
        await dialog(pilot, ConfirmScreen)
        await pilot.press("y")
        await closed(pilot)
        assert store.find() == []
        assert texts(pilot) == []

    run(body, app_of(FakeBackend("a"), store))
    assert (tmp_path / "out.md").read_text() == "# Felines\n\n## You\n\nabout cats\n\n## Answer\n\na\n"
    document = json.loads((tmp_path / "out.json").read_text())
    assert [(turn["role"], turn["content"]) for turn in document["turns"]] == [
        ("user", "about cats"),
        ("assistant", "a"),
    ]
    assert (tmp_path / "out.md").stat().st_mode & 0o077 == 0


def test_the_last_chat_goes_on_with_the_tokens_it_had() -> None:
    store, backend = Store(None), FakeBackend("a")

    async def first(pilot: Pilot[None]) -> None:
        await say(pilot, "one")

    async def second(pilot: Pilot[None]) -> None:
        assert texts(pilot) == ["one", "a"]
        await say(pilot, "two")
        assert backend.asked[1].messages[1].token_ids == (0,)

    run(first, app_of(backend, store, parameters={"temperature": 0.5}))
    run(second, app_of(backend, store, conversation=store.last()))
    assert backend.asked[1].params.temperature == 0.5


def test_beginning_with_the_list() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await dialog(pilot, HistoryScreen)
        await pilot.press("escape")
        await closed(pilot)

    run(body, app_of(FakeBackend(), pick=True))


# --- settings ---


def test_the_system_message_and_the_library() -> None:
    backend = FakeBackend("a")

    async def body(pilot: Pilot[None]) -> None:
        await command(pilot, "/system Be kind.")
        await command(pilot, "/keep kind")
        await command(pilot, "/system")
        await dialog(pilot, TextScreen)
        pilot.app.screen.query_one(TextArea).text = "Be brief."
        await pilot.press("ctrl+s")
        await closed(pilot)
        await say(pilot, "Hi")
        await command(pilot, "/prompts")
        await dialog(pilot, PickScreen)
        await pilot.press("enter")
        await closed(pilot)
        await say(pilot, "Hi")
        systems = [ask.messages[0] for ask in backend.asked]
        assert systems == [Message.system("Be brief."), Message.system("Be kind.")]

    run(body, backend)


def test_sampling_of_a_chat() -> None:
    backend = FakeBackend("a")

    async def body(pilot: Pilot[None]) -> None:
        await command(pilot, "/set temperature 0.2")
        await command(pilot, "/set temperature 99")
        await wait_until(lambda: "between 0 and 5" in shown(pilot), pilot)
        await command(pilot, "/set nonsense 1")
        await pilot.press("f3")
        await dialog(pilot, SettingsScreen)
        inputs = pilot.app.screen
        assert inputs.query_one("#temperature", Input).value == "0.2"
        inputs.query_one("#top_p", Input).value = "wrong"
        await pilot.press("enter")
        await wait_until(lambda: "top_p must be a number" in shown(pilot), pilot)
        inputs.query_one("#top_p", Input).value = "0.9"
        inputs.query_one("#temperature", Input).value = ""
        await pilot.press("enter")
        await closed(pilot)
        await say(pilot, "Hi")
        params = backend.asked[0].params
        assert (params.temperature, params.top_p, params.logprobs) == (None, 0.9, True)

    run(body, backend)


@pytest.mark.parametrize("size", [(80, 24), (40, 12)])
def test_enter_keeps_what_was_typed_before_it_however_fast(size: tuple[int, int]) -> None:
    async def body(pilot: Pilot[None]) -> None:
        for value in ("99", "0.3"):
            await pilot.press("f3")
            await dialog(pilot, SettingsScreen)
            pilot.app.screen.query_one("#temperature", Input).value = ""
            for key in (*value, "enter"):
                pilot.app.simulate_key(key)
            if value == "99":
                await wait_until(lambda: "temperature must" in shown(pilot), pilot)
                await pilot.press("escape")
            await closed(pilot)
        assert screen_of(pilot).conversation.parameters == {"temperature": 0.3}

    run(body, FakeBackend(), size)


def test_sampling_tells_what_a_line_means_however_narrow_it_is() -> None:
    help_of_seed = "the same seed gives the same answer"

    async def body() -> None:
        for size, told in (((40, 12), False), ((80, 24), True)):
            async with chat(FakeBackend(), size) as pilot:
                await settle(pilot)
                await pilot.press("f3")
                await dialog(pilot, SettingsScreen)
                assert (help_of_seed in shown(pilot)) == told
                await pilot.press(*["down"] * (len(parameters.PARAMETERS) - 1))
                await pilot.pause()
                assert pilot.app.focused.id == "seed"
                assert help_of_seed in shown(pilot)
                assert "…" not in shown(pilot)

    asyncio.run(body())


class SlowToStop(FakeBackend):
    """An answer that was stopped ends only when `let_go` is set, as one in the middle of a step does."""

    def __init__(self) -> None:
        super().__init__("one two", held=True)
        self.let_go = asyncio.Event()

    async def answer(self, ask: Ask) -> FakeAnswering:
        answering = await super().answer(ask)
        cancel = answering.cancel

        async def later() -> None:
            await self.let_go.wait()
            cancel()

        self.stops: list[asyncio.Task[None]] = []
        answering.cancel = lambda: self.stops.append(asyncio.create_task(later()))  # type: ignore[method-assign]
        return answering


@pytest.mark.parametrize(
    ("keys", "turns", "asked"),
    [(("ctrl+n",), 0, 1), (("ctrl+r",), 2, 2), (("n", "e", "x", "t", "enter"), 4, 2), (("ctrl+o",), 2, 1)],
)
def test_what_is_done_right_after_escape_waits_for_the_end_of_the_answer(
    keys: tuple[str, ...], turns: int, asked: int
) -> None:
    async def body() -> None:
        backend = SlowToStop()
        async with chat(backend) as pilot:
            await settle(pilot)
            await pilot.press("H", "i", "enter")
            await wait_until(lambda: backend.answers, pilot)
            await pilot.press("escape", *keys)
            await pilot.pause()
            assert len(backend.asked) == 1
            assert "An answer is coming" not in shown(pilot)
            backend.let_go.set()
            await wait_until(lambda: len(backend.asked) == asked, pilot)
            await wait_until(lambda: len(texts(pilot)) == turns, pilot)
            if keys == ("ctrl+o",):
                await dialog(pilot, HistoryScreen)

    asyncio.run(body())


def test_another_model_and_another_theme() -> None:
    made: list[FakeBackend] = []

    def connect(name: str) -> FakeBackend:
        made.append(FakeBackend(f"I am {name}", name=name))
        return made[-1]

    first = FakeBackend("a")
    app = ChatApp(first, Store(None), connect=connect)

    async def body(pilot: Pilot[None]) -> None:
        await command(pilot, "/model nope")
        await settle(pilot)
        assert not first.closed  # what is loaded stays
        await say(pilot, "still there?")
        assert texts(pilot)[-1] == "a"
        await command(pilot, "/model other-2b")
        await settle(pilot)
        assert first.closed
        await say(pilot, "who?")
        assert texts(pilot)[-1] == "I am other-2b"
        assert "other-2b" in shown(pilot)
        await command(pilot, "/theme nord")
        assert app.theme == "nord"
        assert app.store.setting("theme") == "nord"
        await command(pilot, "/theme")
        await dialog(pilot, PickScreen)
        await pilot.press(*"edge-light", "enter")
        await closed(pilot)
        assert app.theme == "edge-light"
        assert "I am other-2b" in shown(pilot)

    run(body, app)


def test_the_list_of_models() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await pilot.press("f4")
        await dialog(pilot, PickScreen)
        assert "other-2b\n" in "\n".join(line.strip(" │") for line in shown(pilot).splitlines())
        assert "200 MB to download" in shown(pilot)
        assert "tok/s" not in shown(pilot), "nothing has answered yet"
        await pilot.press("escape")
        await closed(pilot)
        await say(pilot, "Hi")
        await pilot.press("f4")
        await dialog(pilot, PickScreen)
        assert "96 tok/s here · here" in shown(pilot)
        assert "perhaps 48 tok/s · 200 MB to download" in shown(pilot)

    run(body, FakeBackend())


def test_speeds_are_those_of_the_latest_answers() -> None:
    store = Store(None)
    conversation = Conversation()
    for number, (model, speed) in enumerate([("a", 10.0), ("b", 20.0), ("a", 30.0), ("c", None)]):
        turn = conversation.add(None, Role.ASSISTANT, "x")
        turn = conversation.change(turn.id, facts=Facts(model=model, tokens_per_s=speed), created=float(number))
        store.save_turn(conversation, turn)
    assert list(store.speeds().items()) == [("a", 30.0), ("b", 20.0)]
    known = [
        ModelChoice("a", "", 100),
        ModelChoice("b", "x", 100),
        ModelChoice("new", "y", 300),
        ModelChoice("server's"),
    ]
    told = [one.detail for one in with_speeds(known, store.speeds())]
    assert told == ["30 tok/s here", "20 tok/s here · x", "perhaps 10 tok/s · y", ""]


# --- writing ---


@pytest.mark.parametrize(
    ("size", "listed"), [((80, 24), "/new                   Begin a new chat"), ((40, 12), "/new Begin a new chat")]
)
def test_the_list_of_commands_leaves_room_for_the_rest(size: tuple[int, int], listed: str) -> None:
    async def body(pilot: Pilot[None]) -> None:
        await pilot.press("/")
        await wait_until(lambda: screen_of(pilot).composer.completing, pilot)
        await pilot.pause()
        assert listed in shown(pilot)
        assert "● fake-1b" in shown(pilot), "the status line is where it was"
        if size[0] == 80:
            for command in COMMANDS:
                screen_of(pilot).composer.write(f"/{command.name}")
                await wait_until(lambda command=command: command.help in shown(pilot), pilot)

    run(body, FakeBackend(), size)


def test_commands_are_completed() -> None:
    async def body(pilot: Pilot[None]) -> None:
        composer = screen_of(pilot).composer
        await pilot.press(*"/ti")
        await wait_until(lambda: composer.completing, pilot)
        await wait_until(lambda: "Rename this chat" in shown(pilot), pilot)
        await pilot.press("tab")
        await pilot.pause()
        assert composer.text == "/title "
        assert not composer.completing
        composer.clear()
        await pilot.press("/")
        await wait_until(lambda: composer.completing, pilot)
        await pilot.press("down", "escape")
        await pilot.pause()
        assert not composer.completing
        assert composer.text == "/"
        composer.clear()
        await pilot.press(*"/hel", "enter")
        await dialog(pilot, HelpScreen)

    run(body, FakeBackend())


def test_an_unknown_command_is_said_and_a_path_is_a_question() -> None:
    backend = FakeBackend("a")

    async def body(pilot: Pilot[None]) -> None:
        await command(pilot, "/nonsense")
        await wait_until(lambda: "no command /nonsense" in shown(pilot), pilot)
        screen_of(pilot).composer.clear()
        await say(pilot, "/usr/bin is what?")
        assert [ask.messages[-1].content for ask in backend.asked] == ["/usr/bin is what?"]

    run(body, backend)


def test_enter_is_for_what_was_written_however_fast() -> None:
    """All keys at once: the list of commands is still that of the first ones."""
    backend = FakeBackend("yes")

    async def body(pilot: Pilot[None]) -> None:
        composer = screen_of(pilot).composer
        await pilot.press("/")
        await wait_until(lambda: composer.completing, pilot)
        composer.insert("set temperature 0.5")
        composer.action_send()
        composer.insert("Hello")
        composer.action_send()
        await wait_until(lambda: backend.asked != [], pilot)
        assert backend.asked[0].messages[-1].content == "Hello"
        assert backend.asked[0].params.temperature == 0.5
        composer.insert("/hel")
        composer.action_send()
        await dialog(pilot, HelpScreen)

    run(body, backend)


def test_files_go_with_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("milk\neggs")
    (tmp_path / "more.txt").write_text("bread")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    monkeypatch.chdir(tmp_path)
    backend = FakeBackend("a")

    async def body(pilot: Pilot[None]) -> None:
        await command(pilot, "/attach picture.png")
        await wait_until(lambda: "is not UTF-8 text" in shown(pilot), pilot)
        await command(pilot, "/attach more.txt")
        await wait_until(lambda: "▤ more.txt" in shown(pilot), pilot)
        await pilot.press(*"list @no")
        await wait_until(lambda: screen_of(pilot).composer.completing, pilot)
        await pilot.press("tab")
        await wait_until(lambda: " tokens" in shown(pilot), pilot)
        assert screen_of(pilot).composer.text == "list @notes.txt "
        await say(pilot, "please")
        content = backend.asked[0].messages[0].content
        for part in (
            "File more.txt:\n```\nbread\n```",
            "File notes.txt:\n```\nmilk\neggs\n```",
            "list @notes.txt please",
        ):
            assert part in content
        assert "▤ notes.txt" in shown(pilot)
        await say(pilot, "and now")
        assert backend.asked[1].messages[-1].content == "and now", "a file goes with one question"

    run(body, backend)


@pytest.mark.parametrize("named", ["pipe", "/dev/zero", "folder", "socket"])
@pytest.mark.parametrize("way", ["/attach {}", "what is in @{}?"])
def test_what_is_no_file_is_refused_and_never_opened(tmp_path: Path, way: str, named: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    listening = socket.socket(socket.AF_UNIX)
    backend = FakeBackend("a")

    async def body(pilot: Pilot[None]) -> None:
        await command(pilot, way.format(named))
        await wait_until(lambda: "not a file" in shown(pilot), pilot)
        await settle(pilot)
        assert [ask.messages[-1].content for ask in backend.asked] == ([way.format(named)] if "@" in way else [])
        with pytest.raises(OSError, match="No such device"):  # nobody has it open for reading
            os.open("pipe", os.O_WRONLY | os.O_NONBLOCK)

    with contextlib.closing(listening), contextlib.chdir(tmp_path):
        listening.bind("socket")
        run(body, backend)


def test_the_most_tokens_of_an_answer_are_what_the_settings_and_the_command_line_say() -> None:
    backend = FakeBackend("a")

    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "hi")

    run(body, backend)
    assert backend.asked[0].params.max_tokens == USUAL_MAX_TOKENS
    assert f"usually {USUAL_MAX_TOKENS}" in parameters.BY_NAME["max_tokens"].help
    assert f"default: {USUAL_MAX_TOKENS}." in " ".join(
        CliRunner().invoke(application(), ["chat", "--help"]).stdout.split()
    )


def test_a_server_that_cannot_fork_is_not_taken_for_the_model() -> None:
    async def body(pilot: Pilot[None]) -> None:
        pilot.app.push_screen(InspectorScreen((info("a", ("b", -2.0)),), forks=False))
        await dialog(pilot, InspectorScreen)
        await pilot.press("down", "enter")
        await wait_until(lambda: "This server cannot go on" in shown(pilot), pilot)
        assert isinstance(pilot.app.screen, InspectorScreen)

    run(body, FakeBackend("a"))


# --- help ---


def test_the_help_tells_every_key_and_command() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await pilot.press("f1")
        await dialog(pilot, HelpScreen)
        told = shown(pilot)
        for owner in (ChatScreen, type(screen_of(pilot).composer), ChatApp):
            for binding in owner.BINDINGS:
                assert binding.description in told
        for one in COMMANDS:
            assert one.usage in told
        assert told.count("Ctrl+C") == 1
        assert "  Shift+Tab, Ctrl+↑ " in told
        await pilot.press("escape")
        await closed(pilot)

    run(body, FakeBackend(), (100, 140))


def test_the_help_in_a_narrow_window_is_wrapped_below_its_lines() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await pilot.press("f1")
        await dialog(pilot, HelpScreen)
        lines = shown(pilot).splitlines()
        (at,) = [at for at, line in enumerate(lines) if "Ctrl+R  Answer again, beside the " in line]
        assert lines[at + 1].index("last answer") == lines[at].index("Ctrl+R") + 2

    run(body, FakeBackend(), (40, 140))


def test_the_palette_offers_the_commands() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "Hi")
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"/retry")
        await wait_until(lambda: "Answer the last question again" in shown(pilot), pilot)
        await pilot.press("enter")
        await wait_until(lambda: texts(pilot) == ["Hi", "b"], pilot)

    run(body, FakeBackend("a", "b"))


def test_every_command_has_its_method() -> None:
    assert all(callable(getattr(ChatScreen, f"do_{one.name}")) for one in COMMANDS)


def test_thinking_is_folded_until_it_is_asked_for() -> None:
    async def body(pilot: Pilot[None]) -> None:
        await say(pilot, "Hi")
        assert "▸ thought (3 words)" in shown(pilot)
        assert "deep thoughts here" not in shown(pilot)
        await pilot.press("shift+tab", "t")
        await pilot.pause()
        assert "deep thoughts here" in shown(pilot)
        assert screen_of(pilot).conversation.path()[1].reasoning == "deep thoughts here"
        assert screen_of(pilot).conversation.path()[1].message() == Message(
            Role.ASSISTANT, "yes", token_ids=(0,), tokenizer_digest="d" * 16
        )

    run(body, FakeBackend(answer_of("yes", reasoning="deep thoughts here")))
