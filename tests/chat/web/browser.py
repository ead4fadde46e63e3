"""Headless Chromium, told what to do over its DevTools protocol: https://chromedevtools.github.io/devtools-protocol/."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """Where Chromium is."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab; `requests` are the URLs that it asked for, `complaints` what the browser had to say about the page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._count = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def tell(self, method: str, **values: Any) -> dict[str, Any]:
        """Give a command, and its result."""
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": values})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._count:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            match message:
                case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                    self.requests.append(url)
                case {"method": "Network.webSocketCreated", "params": {"url": url}}:
                    self.requests.append(url)
                case {"method": "Log.entryAdded", "params": {"entry": entry}}:
                    self.complaints.append(entry["text"])
                case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                    self.complaints.append(details["text"])

    async def go(self, url: str) -> None:
        await self.tell("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """What a script gives, or what its promise does."""
        told = await self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return told["result"].get("value")

    async def until(self, script: str, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not await self.value(script):
                await asyncio.sleep(0.05)

    async def type(self, text: str) -> None:
        await self.tell("Input.insertText", text=text)

    async def enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        await self.tell("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        await self.tell("Input.dispatchKeyEvent", type="keyUp", **key)

    async def picture(self) -> bytes:
        """A PNG of what is to be seen."""
        return base64.b64decode((await self.tell("Page.captureScreenshot", format="png"))["data"])


@contextlib.asynccontextmanager
async def chromium(profile: Path, width: int = 900, height: int = 560) -> AsyncIterator[Page]:
    """A browser that knows nothing, with one empty tab."""
    found = program()
    assert found is not None
    process = await asyncio.create_subprocess_exec(
        *(found, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--no-first-run"),
        *("--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={profile}"),
        *("--hide-scrollbars", f"--window-size={width},{height}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        while not (told := re.search(rb"ws://([\w.:]+)/", await process.stderr.readline())):
            assert process.returncode is None
        reading = asyncio.create_task(process.stderr.read())  # or it would wait for somebody to read it
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://{told[1].decode()}/json") as response:
                (address,) = [tab["webSocketDebuggerUrl"] for tab in await response.json() if tab["type"] == "page"]
            async with client.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.tell(f"{domain}.enable")
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await page.tell("Emulation.setDeviceMetricsOverride", **size)
                yield page
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()
