"""TabDriver: Textual's driver for a browser, which notices that nobody is there any more, and takes no more than it can do."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Iterator

from textual import events, messages
from textual.app import ScreenStackError
from textual.drivers.web_driver import WebDriver
from textual.message import Message
from textual.message_pump import MessagePump

GRACE_S = 2.0
"""how long the chat may take to end once nobody is there any more"""
MOST_WAITING = 64
"""events that wait for one part of the chat; more stay with whoever sends them"""
_LOOK_S = 0.01


class TabDriver(WebDriver):
    """The end of its input or output, however it came, ends the chat and its process: nothing is left behind."""

    _sent = 0

    def start_application_mode(self) -> None:
        super().start_application_mode()
        threading.Thread(target=self._end_when_left, name="edge-llm tab", daemon=True).start()
        # Textual's begins without the focus, and the page may have told of it before anybody listened
        self._app.call_later(self._app.post_message, events.AppFocus())

    def _end_when_left(self) -> None:
        """Also while much of the input is not read yet, and while the chat is busy."""
        poll = select.poll()
        for descriptor in (0, 1):
            poll.register(descriptor, 0)  # errors and the end are told in any case
        poll.poll()
        self._exit()
        time.sleep(GRACE_S)
        os._exit(1)

    def run_input_thread(self) -> None:
        super().run_input_thread()
        self._exit()

    def _exit(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._app._post_message(messages.ExitApp()), loop=self._loop)

    def send_message(self, message: Message) -> None:
        super().send_message(message)
        self._catch_up()

    def on_meta(self, packet_type: str, payload: dict[str, object]) -> None:
        super().on_meta(packet_type, payload)
        self._catch_up()

    def _catch_up(self) -> None:
        """Let the chat do what was sent, now and then: an event takes far more memory than the key that it is made of."""
        self._sent += 1
        if self._sent % MOST_WAITING:
            return
        posted = threading.Event()
        self._loop.call_soon_threadsafe(posted.set)
        while not (posted.is_set() and self._waiting() < MOST_WAITING):
            if self.exit_event.wait(_LOOK_S) or self._loop.is_closed():
                break

    def _waiting(self) -> int:
        return max(part.message_queue_size for part in self._takers())

    def _takers(self) -> Iterator[MessagePump]:
        """Where keys pass through."""
        yield self._app
        try:
            screen = self._app.screen
        except ScreenStackError:
            return
        yield screen
        if screen.focused is not None:
            yield screen.focused
