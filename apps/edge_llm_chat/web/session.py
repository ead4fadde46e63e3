"""Session: one tab's chat, a process of its own, and what goes between it and the browser's websocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from aiohttp import WSMsgType, web
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START
from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

from edge_llm.text.terminal import clean
from edge_llm_chat.paste import MOST_PASTED
from edge_llm_chat.web.processes import see_end

GRACE_S = 4.0
"""how long a chat may take to end before it is killed"""
STUCK_S = 30.0
"""how long a chat may take nothing of what is typed before it is ended"""
MOST_CELLS = 1000
"""columns or rows of a window"""
MOST_KEYS = 4096
"""characters that are typed at a time"""
_READY = b"__GANGLION__\n"
_CLEARED = "\x1b[?1049l\x1b[0m\x1b[2J\x1b[H"
_MOST_BYTES = 1 << 24
"""of one packet: more is no screen, but a program that has lost its way"""
_KEPT_WORDS = 2000


class Session(AppService):
    """The program `command` behind a websocket. Nothing of textual-serve but its packets: no shell, no downloads, no logs."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], websocket: web.WebSocketResponse
    ) -> None:
        super().__init__(
            "",
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=websocket.close,  # type: ignore[arg-type]  # whether it was open is of no interest
            download_manager=DownloadManager(),
        )
        self._argv, self._own_environment = list(command), dict(environment)
        self._websocket = websocket

    async def talk(self, width: int, height: int) -> None:
        """Until the chat ends or the browser goes away; then the process has ended, too."""
        await self.start(width, height)
        try:
            async for message in self._websocket:  # the next is not read before this one is taken
                if message.type is not WSMsgType.TEXT:
                    break
                async with asyncio.timeout(STUCK_S):
                    if not await self._hear(message.data):
                        break
        except TimeoutError:
            pass
        finally:
            await asyncio.shield(self.stop())

    async def _hear(self, text: str) -> bool:
        """Do what the page says; False if it is nothing that our page would say."""
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return False
        match said:
            case ["stdin", str(keys)]:
                return await self.send_bytes(typed(keys).encode("utf-8", "replace"))
            case ["resize", {"width": int(width), "height": int(height)}] if fits(width) and fits(height):
                await self.set_terminal_size(width, height)
            case ["ping", str(sent)]:
                await self._websocket.send_json(["pong", sent[:32]])
            case ["focus"]:
                await self.focus()
            case ["blur"]:
                await self.blur()
            case _:
                return False
        return True

    async def _open_app_process(self, width: int = 80, height: int = 24) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._own_environment | screen_environment(width, height),
            process_group=0,  # a Ctrl-C at the terminal is ours: we end them
        )
        self._stdin = self._process.stdin
        return self._process

    async def run(self) -> None:
        """Lead what the chat draws to the browser, and say there how it ended if it did not end well."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        words = asyncio.create_task(_last_words(process.stderr))
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await process.stdout.readuntil(_READY)
            while True:
                kind, size = await process.stdout.readexactly(1), await process.stdout.readexactly(4)
                length = int.from_bytes(size, "big")
                if kind not in (b"D", b"M", b"P") or length > _MOST_BYTES:
                    break
                payload = await process.stdout.readexactly(length)
                if kind == b"D":
                    await self._show(payload)
                elif kind == b"M" and payload == _EXIT:
                    break
        await see_end(process, GRACE_S)
        if process.returncode:
            told = await words or f"The chat has ended by a fault (exit code {process.returncode})"
            await self._show((_CLEARED + told.replace("\n", "\r\n")).encode())
        words.cancel()
        await self._websocket.close()

    async def _show(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):  # the browser is gone; the chat must still be heard
            await self.remote_write_bytes(data)

    async def stop(self) -> None:
        """Tell the chat to end, and see that it does."""
        if self._process is None or self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.send_meta({"type": "quit"})
                await asyncio.shield(self._task)
        await see_end(self._process, 0.0)
        await self._task


def typed(text: str) -> str:
    """As much of `text` as is typed or pasted at a time; of a paste one character more than the chat takes, as it says itself."""
    if not text.startswith(BRACKETED_PASTE_START):
        return text[:MOST_KEYS]
    pasted, _, keys = text.removeprefix(BRACKETED_PASTE_START).partition(BRACKETED_PASTE_END)
    return BRACKETED_PASTE_START + pasted[: MOST_PASTED + 1] + BRACKETED_PASTE_END + keys[:MOST_KEYS]


def fits(cells: int) -> bool:
    """A window may have so many columns or rows."""
    return 1 <= cells <= MOST_CELLS


def screen_environment(width: int, height: int) -> dict[str, str]:
    """What tells Textual to draw for a page of so many cells."""
    return {
        "TEXTUAL_DRIVER": "edge_llm_chat.web.driver:TabDriver",
        "TEXTUAL_FPS": "30",
        "TEXTUAL_COLOR_SYSTEM": "truecolor",
        "TERM_PROGRAM": "textual",
        "TERM_PROGRAM_VERSION": version("textual-serve"),
        "COLUMNS": str(width),
        "ROWS": str(height),
    }


async def _last_words(stream: asyncio.StreamReader) -> str:
    """What the program said of its end: one error of ours; of a traceback, which may show what was written, nothing."""
    kept = b""
    while data := await stream.read(4096):
        kept = (kept + data)[-_KEPT_WORDS:]
    text = clean(kept.decode("utf-8", "replace"))
    return text if text.startswith("error: ") else ""


_EXIT = json.dumps({"type": "exit"}).encode()
