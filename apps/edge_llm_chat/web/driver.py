"""TabDriver: Textual's driver for a browser, which also notices that nobody is there any more."""

from __future__ import annotations

import asyncio

from textual import events, messages
from textual.drivers.web_driver import WebDriver


class TabDriver(WebDriver):
    """The end of its input, however it came, ends the chat: no process is left behind."""

    def start_application_mode(self) -> None:
        super().start_application_mode()
        # Textual's begins without the focus, and the page may have told of it before anybody listened
        self._app.call_later(self._app.post_message, events.AppFocus())

    def run_input_thread(self) -> None:
        super().run_input_thread()
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._app._post_message(messages.ExitApp()), loop=self._loop)
