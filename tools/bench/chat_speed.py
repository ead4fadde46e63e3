"""What the full-screen chat takes of a real model's speed: `python -m tools.bench.chat_speed [--rounds N] [--tokens N] [--json]`.

One process, one engine, one chat on a terminal of its own (pty). In turn, the same prompt is answered by the same engine: read by
a loop that shows nothing, as `run` asks (`plain`) and as the chat asks, with ten alternatives a token (`asked`), and on screen
(`shown`). Tokens a second are the engine's own figure, and those of the whole answer from question to last paint; CPU time is
that of the whole process. Ratios are of one round; given is their median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_llm_chat.answering import Answer
from edge_llm_chat.app import ChatApp
from edge_llm_chat.backend import Answering, Ask
from edge_llm_chat.local_backend import LocalBackend
from edge_llm_chat.screens.conversation import ConversationScreen
from edge_llm_chat.store import Store

from edge_llm.config import EngineConfig
from edge_llm.install.catalog import DEFAULT_MODEL
from edge_llm.messages import Finished
from tools.bench.chat_ui import in_terminal

PROMPT = "Write a long story about a lighthouse keeper, with a list of ships and a table of their cargo."
ARMS = ("plain", "asked", "shown")


class Listening(LocalBackend):
    """Keeps what was asked last."""

    asked: Ask | None = None

    async def answer(self, ask: Ask) -> Answering:
        self.asked = ask
        return await super().answer(ask)


async def read(backend: LocalBackend, ask: Ask) -> Finished:
    answer = Answer()
    await answer.run(backend, ask)
    assert answer.finished is not None, answer.error
    return answer.finished


async def show(screen: ConversationScreen, question: int) -> Finished:
    screen._start(question)
    while screen.answer is None:
        await asyncio.sleep(0.001)
    answer = screen.answer
    while screen.busy:
        await asyncio.sleep(0.02)
    assert answer.finished is not None, answer.error
    return answer.finished


async def measured(model: str, rounds: int, tokens: int) -> list[dict[str, dict[str, float]]]:
    """For each round, what each arm gave."""
    backend = Listening(model, lambda: EngineConfig(prefix_cache="memory", speculation="off"))
    app = ChatApp(backend, Store(None))
    found: list[dict[str, dict[str, float]]] = []

    async def act() -> None:
        while not app.screen_stack or not isinstance(app.screen, ConversationScreen) or app.screen.model is None:
            await asyncio.sleep(0.05)
        screen = app.screen
        screen.conversation.parameters |= {"temperature": 0.0, "max_tokens": tokens}
        await screen.ask(PROMPT)
        while screen.busy:
            await asyncio.sleep(0.05)
        question, asked = screen.conversation.path()[0].id, backend.asked
        assert asked is not None
        plain = replace(asked, params=replace(asked.params, logprobs=False, top_logprobs=0))
        for number in range(rounds):
            found.append({})
            for arm in (ARMS, ARMS[::-1])[number % 2]:
                before, started = time.process_time(), time.perf_counter()
                if arm == "shown":
                    end = await show(screen, question)
                else:
                    end = await read(backend, plain if arm == "plain" else asked)
                used, wall = time.process_time() - before, time.perf_counter() - started
                count = end.usage.completion_tokens
                found[-1][arm] = {
                    "tokens": count,
                    "tokens_per_s": end.timings.decode_tokens_per_s or 0.0,
                    "whole_tokens_per_s": count / wall,
                    "cpu_ms_per_token": 1e3 * used / count,
                }

    acting = asyncio.create_task(act())
    acting.add_done_callback(lambda _: app.exit())
    await app.run_async()
    await acting
    return found


def summary(found: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of each arm, and of the ratios to `plain` within each round."""
    lines: dict[str, Any] = {}
    for arm in ARMS:
        lines[arm] = {name: statistics.median(one[arm][name] for one in found) for name in found[0][arm]}
        for name in ("tokens_per_s", "whole_tokens_per_s", "cpu_ms_per_token"):
            lines[arm][f"{name}_ratio"] = statistics.median(one[arm][name] / one["plain"][name] for one in found)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.chat_speed", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result is not None:
        options.result.write_text(json.dumps(asyncio.run(measured(options.model, options.rounds, options.tokens))))
        return
    with tempfile.NamedTemporaryFile("r") as result:
        arguments = ["--model", options.model, "--rounds", str(options.rounds), "--tokens", str(options.tokens)]
        in_terminal("tools.bench.chat_speed", [*arguments, "--result", result.name])
        found = json.load(result)
    for arm, figures in summary(found).items():
        line = {"arm": arm, **{name: round(value, 3) for name, value in figures.items()}}
        print(json.dumps(line) if options.json else "  ".join(f"{name} {value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
