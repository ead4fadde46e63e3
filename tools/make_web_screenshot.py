"""A picture of the chat in a browser: `python -m tools.make_web_screenshot [FILE]` (default docs/images/chat-web.png).

The real model answers, in headless Chromium; EDGE_LLM_HOME says where it is installed.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from edge_llm import paths
from tests.chat.web.browser import chromium
from tests.chat.web.program import chat_web
from tools.make_screenshots import FOLDER

QUESTION = "What is the capital of France?"
_READING_S = 4.0
"""more than the answer takes: what a terminal in a browser shows cannot be asked for"""


async def picture(file: Path, profile: Path) -> None:
    home = paths.data_dir().parent
    async with chat_web(home, "--private", "--temperature", "0") as program, chromium(profile) as page:
        await page.go(program.link)
        await page.until("document.body.classList.contains('-first-byte')")
        await page.type(QUESTION)
        await page.enter()
        await asyncio.sleep(_READING_S)
        file.write_bytes(await page.picture())
        await program.end()


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "chat-web.png"
    with tempfile.TemporaryDirectory(prefix="edge-llm-") as profile:
        asyncio.run(picture(file, Path(profile)))


if __name__ == "__main__":
    main()
