"""Apps over the fake backend. Each test has a home folder of its own, and nothing waits for a clock."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from edge_llm_chat.app import ChatApp, Start
from edge_llm_chat.backend import ChatBackend
from edge_llm_chat.screens.conversation import ConversationScreen
from edge_llm_chat.store import Store
from textual.pilot import Pilot


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("EDGE_LLM_HOME", str(home))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return home


@pytest.fixture
def model_home(tmp_path: Path, smollm2_folder: Path, kernels: object, home: Path) -> Path:
    """A home folder with the model installed and the kernels compiled."""
    own = tmp_path / "home"
    (own / "data" / "models").mkdir(parents=True, mode=0o700)
    (own / "data").chmod(0o700)
    shutil.copytree(smollm2_folder, own / "data" / "models" / "smollm")
    shutil.copytree(home / "cache" / "kernels", own / "cache" / "kernels")
    (own / "cache").chmod(0o700)
    return own


@pytest.fixture(autouse=True)
def own_idea_of_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's pilot sleeps after each key until the process takes little CPU time, which on a busy machine takes seconds
    and says nothing. Idle is: nothing is left that the event loop could run now."""

    async def nothing_left(*_: float) -> None:
        quiet = 0
        while quiet < 3:
            await asyncio.sleep(0)
            quiet = 0 if asyncio.get_running_loop()._ready else quiet + 1  # type: ignore[attr-defined]

    monkeypatch.setattr("textual.app.wait_for_idle", nothing_left)
    monkeypatch.setattr("textual.pilot.wait_for_idle", nothing_left)


def app_of(backend: ChatBackend, store: Store | None = None, **start: object) -> ChatApp:
    return ChatApp(backend, store or Store(None), Start(**start))  # type: ignore[arg-type]


def chat(app: ChatApp | ChatBackend, size: tuple[int, int] = (80, 24)) -> AbstractAsyncContextManager[Pilot[None]]:
    """The app, or one over this backend, running; gives its pilot."""
    app = app if isinstance(app, ChatApp) else app_of(app)
    return app.run_test(size=size, notifications=True)


async def wait_until(true: Callable[[], object], pilot: Pilot[None], what: str = "") -> None:
    """Lets the app run until `true`; fails if that never comes."""
    for _ in range(500):
        if true():
            return
        await pilot.pause()
        await asyncio.sleep(0.005)
    raise AssertionError(f"never came: {what or true}")


async def settle(pilot: Pilot[None]) -> None:
    """Until no answer is coming and everything is drawn."""
    await pilot.pause()
    await wait_until(lambda: not screen_of(pilot).busy and screen_of(pilot).model is not None, pilot)
    await pilot.pause()


async def say(pilot: Pilot[None], text: str) -> None:
    """Type a line, send it, and wait for the answer."""
    screen_of(pilot).composer.insert(text)
    await pilot.press("enter")
    await settle(pilot)


def screen_of(pilot: Pilot[None]) -> ConversationScreen:
    screens = [screen for screen in pilot.app.screen_stack if isinstance(screen, ConversationScreen)]
    return screens[-1]


def shown(pilot: Pilot[None]) -> str:
    """All that is on the screen, line by line."""
    width, height = pilot.app.size
    strips = pilot.app.screen._compositor.render_strips(pilot.app.size)
    assert len(strips) == height
    return "\n".join(strip.text[:width].rstrip() for strip in strips)


def texts(pilot: Pilot[None]) -> list[str]:
    """The contents of the messages that are shown."""
    return [view.turn.content for view in screen_of(pilot).transcript.views]
