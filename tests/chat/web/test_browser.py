"""The chat in a real browser, headless Chromium, with the real model behind it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from edge_llm_chat.store import Store

from edge_llm.messages import Role
from tests.chat.web.browser import chromium, program
from tests.chat.web.program import chat_web

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(program() is None, reason="chromium is not installed"),
]
_FETCH = "fetch({url}, {{credentials: 'include'}}).then(answer => 'read', () => 'refused')"
_SOCKET = """new Promise(tell => {{
    const socket = new WebSocket({url} + "ws?width=80&height=24");
    socket.onopen = () => tell("open");
    socket.onerror = () => tell("refused");
}})"""


async def other_page() -> tuple[web.AppRunner, str]:
    """An empty page of another server on this machine: another origin, though the same site."""

    async def empty(_request: web.Request) -> web.Response:
        return web.Response(text="<p>other", content_type="text/html")

    application = web.Application()
    application.add_routes([web.get("/", empty)])
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/"


def answers() -> list[str]:
    store = Store.open()
    try:
        return [
            turn.content
            for summary in store.find()
            for turn in store.load(summary.id).path()
            if turn.role is Role.ASSISTANT
        ]
    finally:
        store.close()


def test_a_question_in_a_browser_and_a_page_that_is_not_ours(model_home: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            chat_web(model_home, "-m", "smollm", "--max-tokens", "20", "--temperature", "0") as served,
            chromium(tmp_path / "profile") as page,
        ):
            ours = served.link.partition("#")[0]
            await page.go(ours)
            await page.until("document.title == 'edge-llm' && document.readyState == 'complete'")
            await page.go(served.link)  # in the same tab, as one does
            await page.until("document.body.classList.contains('-first-byte')")
            assert await page.value("location.href") == ours, "the key is out of the address"
            assert await page.value("document.cookie") == "", "no script can read the cookie"
            assert not [
                url for url in page.requests if not url.startswith((ours, ours.replace("http", "ws", 1), "data:"))
            ]
            refused = [text for text in page.complaints if "403" not in text]  # the door, before the key was given
            assert not refused
            await page.type("What is the capital of France?")
            await page.enter()
            async with asyncio.timeout(60):
                while not any("France" in text for text in answers()):
                    await asyncio.sleep(0.1)
            picture = await page.picture()
            assert picture.startswith(b"\x89PNG")
            assert len(picture) > 10_000, "more than an empty page"

            runner, other = await other_page()
            await page.go(other)
            await page.until(f"location.href == {json.dumps(other)} && document.readyState == 'complete'")
            url = json.dumps(ours)
            assert await page.value(_FETCH.format(url=url)) == "refused"
            assert await page.value(_SOCKET.format(url=url.replace("http", "ws", 1))) == "refused"
            await runner.cleanup()
            assert await served.end() == 0

    asyncio.run(body())
