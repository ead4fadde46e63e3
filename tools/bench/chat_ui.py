"""What the full-screen chat costs while an answer streams: `python -m tools.bench.chat_ui [--rate R] [--seconds S] [--json]`.

A thread says a Markdown answer token by token through the engine's own mailbox, so many a second, while keys are typed or not.
Counted: CPU time a token of the process without the speaker, beside that of a loop that only reads the events; paints; the time
from a key to the paint that shows it. Without a terminal, and in a pty.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_llm_chat.answering import Answer
from edge_llm_chat.app import ChatApp
from edge_llm_chat.backend import Ask, ModelInfo, Progress
from edge_llm_chat.screens.conversation import ConversationScreen
from edge_llm_chat.store import Store
from edge_llm_chat.widgets.composer import Composer
from textual import events
from textual.strip import Strip

from edge_llm.engine.handle import Handle, Mailbox
from edge_llm.messages import Message, TextDelta
from tests.chat.fakes import FakeBackend, finished, info
from tools.bench.worker_process import ROOT

MODES = ("bare", "headless", "pty", "headless typing", "pty typing")
SIZE = (100, 30)
KEY_S = 0.13
"""seconds between two keys: fast typing"""
TEXT = """The sea was **calm** and the light turned slowly, as it had done every night for a hundred years or more.

- the keeper had *counted* the ships that passed, and written their names into a book
- nobody had ever read it, for the `ink` had faded

```python
def longest(path: str) -> str:
    with open(path) as file:
        return max((w for line in file for w in line.split()), key=len)
```

"""


def pieces(tokens: int) -> Iterator[TextDelta]:
    """An answer of so many tokens, with ten alternatives each, as the chat asks for them."""
    words = [word if i == 0 else f" {word}" for i, word in enumerate(TEXT.split(" "))]
    others = [(f" other{i}", -2.0 - i) for i in range(9)]
    said = [TextDelta(word, (info(word, *others),)) for word in words]
    for number in range(tokens):
        yield said[number % len(said)]


class Speaker(FakeBackend):
    """Says `tokens` tokens, `rate` a second, from a thread and through a mailbox as an engine does."""

    def __init__(self, tokens: int, rate: float) -> None:
        super().__init__(name="smollm2-135m-instruct")
        self._tokens, self._rate = tokens, rate
        self.speaking_s = 0.0
        """CPU time of the thread that speaks"""

    async def load(self, progress: Progress) -> ModelInfo:
        return ModelInfo(self.wanted, 8192, "d" * 16, inspects=True, forks=True)

    async def answer(self, ask: Ask) -> Handle:  # type: ignore[override]
        mailbox = Mailbox()
        threading.Thread(target=self._say, args=(mailbox,), daemon=True).start()
        return Handle(mailbox, lambda: None)

    def _say(self, mailbox: Mailbox) -> None:
        started = time.perf_counter()
        for number, piece in enumerate(pieces(self._tokens)):
            time.sleep(max(0.0, started + number / self._rate - time.perf_counter()))
            mailbox.put(piece)
        self.speaking_s = time.thread_time()
        mailbox.put(finished(tokens=self._tokens))


def watch(app: ChatApp) -> tuple[list[float], list[float]]:
    """Lists that fill while `app` runs: seconds from each key to its paint, and the time of each paint."""
    pending: deque[tuple[float, int]] = deque()
    delays: list[float] = []
    paints: list[float] = []
    typed = drawn = 0
    on_event, display, render_line = app.on_event, app._display, Composer.render_line

    async def noting_event(event: events.Event) -> None:
        nonlocal typed
        if isinstance(event, events.Key):
            if not (isinstance(app.screen, ConversationScreen) and app.screen.busy):
                return  # not yet, or not any more
            typed += 1
            pending.append((event.time, typed))
        await on_event(event)

    def noting_line(composer: Composer, y: int) -> Strip:
        nonlocal drawn
        drawn = len(composer.text)
        return render_line(composer, y)

    def noting_display(screen: Any, renderable: Any) -> None:
        display(screen, renderable)
        now = time.monotonic()
        paints.append(now)
        while pending and pending[0][1] <= drawn:
            delays.append(now - pending.popleft()[0])

    app.on_event, app._display = noting_event, noting_display  # type: ignore[method-assign]
    Composer.render_line = noting_line  # type: ignore[method-assign, assignment]
    return delays, paints


async def bare(tokens: int, rate: float) -> dict[str, Any]:
    """A loop that reads the events of one answer and keeps them."""
    speaker = Speaker(tokens, rate)
    before, started = time.process_time(), time.perf_counter()
    await Answer().run(speaker, Ask((Message.user("Hi"),)))
    return _figures(tokens, before, started, speaker)


async def shown(tokens: int, rate: float, *, headless: bool, typing: bool) -> dict[str, Any]:
    """The chat, answering once while keys are typed."""
    speaker = Speaker(tokens, rate)
    app = ChatApp(speaker, Store(None))
    delays, paints = watch(app)
    figures: dict[str, Any] = {}

    async def act() -> None:
        while not app.screen_stack or not isinstance(app.screen, ConversationScreen) or app.screen.model is None:
            await asyncio.sleep(0.05)
        screen = app.screen
        await asyncio.sleep(0.3)
        before, started = time.process_time(), time.perf_counter()
        await screen.ask("Hi")
        typist = asyncio.create_task(_type(app)) if headless and typing else None
        while screen.busy:
            await asyncio.sleep(0.05)
        figures.update(_figures(tokens, before, started, speaker))
        figures["paints_per_s"] = sum(when <= started + figures["wall_s"] for when in paints) / figures["wall_s"]
        if typist is not None:
            typist.cancel()
        await asyncio.sleep(0.2)

    acting = asyncio.create_task(asyncio.wait_for(act(), 120))
    acting.add_done_callback(lambda _: app.exit())  # also if it fails
    await app.run_async(headless=headless, size=SIZE if headless else None)
    await acting
    if len(delays) > 1:
        figures |= {"keys": len(delays), "key_p50_ms": 1e3 * statistics.median(delays)}
        figures["key_p95_ms"] = 1e3 * statistics.quantiles(delays, n=20)[-1]
    return figures


async def _type(app: ChatApp) -> None:
    while True:
        app.post_message(events.Key("x", "x"))
        await asyncio.sleep(KEY_S)


def _figures(tokens: int, before: float, started: float, speaker: Speaker) -> dict[str, Any]:
    used, wall = time.process_time() - before - speaker.speaking_s, time.perf_counter() - started
    return {
        "ms_per_token": 1e3 * used / tokens,
        "cpu_share": used / wall,
        "tokens_per_s": tokens / wall,
        "wall_s": wall,
    }


def measured(mode: str, seconds: float, rate: float) -> dict[str, Any]:
    """One mode, in a process of its own."""
    with tempfile.NamedTemporaryFile("r") as result, tempfile.TemporaryDirectory() as home:
        arguments = ["--one", mode, "--seconds", str(seconds), "--rate", str(rate), "--result", result.name]
        if mode.startswith("pty"):
            in_terminal("tools.bench.chat_ui", arguments, typing=mode.endswith("typing"), EDGE_LLM_HOME=home)
        else:
            command = [sys.executable, "-m", "tools.bench.chat_ui", *arguments]
            subprocess.run(command, cwd=ROOT, env={**os.environ, "EDGE_LLM_HOME": home}, check=True)
        figures: dict[str, Any] = json.load(result)
    return figures


def in_terminal(module: str, arguments: list[str], *, typing: bool = False, **variables: str) -> None:
    """Run a module in a terminal of SIZE until it ends, typing letters meanwhile or not."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **variables}
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (SIZE[1], SIZE[0]))
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    typed = time.monotonic() + 2.0  # when the screen is there
    try:
        while process.poll() is None:
            if select.select([ours], [], [], 0.02)[0]:
                os.read(ours, 1 << 16)
            if typing and time.monotonic() - typed > KEY_S:
                typed = time.monotonic()
                os.write(ours, b"x")
    except OSError:  # it has ended
        process.wait()
    finally:
        os.close(ours)
    if process.returncode:
        sys.exit(f"the chat ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.chat_ui", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rate", type=float, action="append", help="tokens a second; repeatable; default: 30, 300, 2000"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of an answer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rates = options.rate or [30.0, 300.0, 2000.0]
    if options.one:
        headless, typing = options.one.startswith("headless"), options.one.endswith("typing")
        task = bare if options.one == "bare" else functools.partial(shown, headless=headless, typing=typing)
        options.result.write_text(json.dumps(asyncio.run(task(int(options.seconds * rates[0]), rates[0]))))
        return
    for rate in rates:
        for mode in MODES:
            figures = measured(mode, options.seconds, rate)
            line = {"mode": mode, "rate": rate, **{name: round(value, 3) for name, value in figures.items()}}
            print(json.dumps(line) if options.json else "  ".join(f"{name} {value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
