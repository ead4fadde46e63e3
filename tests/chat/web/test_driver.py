"""The driver of a tab: what it does when nobody is there any more, and when more comes than the chat can do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from edge_llm_chat.web import driver
from edge_llm_chat.web.driver import TabDriver
from edge_llm_chat.web.session import screen_environment
from textual import events
from textual.message import Message

from tests.cli.conftest import ROOT

BUSY = """
import time
from textual.app import App
class Busy(App):
    def on_key(self):
        self._driver.write("I am busy")
        time.sleep(1000)
Busy().run()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the chat in a browser needs signals of POSIX")
@pytest.mark.parametrize("lost", ["stdin", "stdout"])
def test_a_chat_that_nobody_sees_ends_even_if_it_is_busy_and_much_was_typed(lost: str) -> None:
    environment = {"PYTHONPATH": f"{ROOT / 'apps'}{os.pathsep}{ROOT}"} | screen_environment(80, 24)
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        keys = b"a" * 20_000
        process.stdin.write(b"D" + len(keys).to_bytes(4, "big") + keys)
        process.stdin.flush()
        while b"I am busy" not in process.stdout.read1():  # type: ignore[attr-defined]
            pass
        getattr(process, lost).close()
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            stream.close()


class Part(SimpleNamespace):
    """An app, a screen or a widget that does nothing with what it is sent."""

    message_queue_size = 0

    async def _post_message(self, _message: Message) -> None:
        self.message_queue_size += 1


@pytest.mark.parametrize("slow", ["app", "screen", "focused"])
def test_what_a_chat_cannot_do_yet_stays_with_who_sent_it(slow: str) -> None:
    focused = Part()
    screen = Part(focused=focused)
    app = Part(screen=screen)
    part = {"app": app, "screen": screen, "focused": focused}[slow]

    async def body() -> None:
        tab = TabDriver.__new__(TabDriver)
        tab._app, tab._loop, tab.exit_event = app, asyncio.get_running_loop(), threading.Event()  # type: ignore[assignment]
        sent: list[int] = []

        def send() -> None:
            for number in range(10 * driver.MOST_WAITING):
                tab.send_message(events.Key("a", "a"))
                sent.append(number)

        part.message_queue_size = driver.MOST_WAITING
        sending = asyncio.create_task(asyncio.to_thread(send))
        while len(sent) < driver.MOST_WAITING - 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(sent) == driver.MOST_WAITING - 1
        while not sending.done():  # it is taken now
            app.message_queue_size = part.message_queue_size = 0
            await asyncio.sleep(0.01)
        assert len(sent) == 10 * driver.MOST_WAITING
        part.message_queue_size = driver.MOST_WAITING
        tab.exit_event.set()
        await asyncio.to_thread(send)  # nobody will take it

    asyncio.run(body())
