"""Pictures of the chat for the documentation: `python -m tools.make_screenshots [FOLDER]` (default docs/images).

The answers come from a script, so that the pictures stay the same from machine to machine.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from edge_llm_chat.app import ChatApp, Start
from edge_llm_chat.conversation import Conversation
from edge_llm_chat.screens.conversation import ConversationScreen
from edge_llm_chat.store import Store
from textual.pilot import Pilot
from textual.widgets import TextArea

from edge_llm.messages import Message, PromptProgress, ReasoningDelta, Role, TextDelta, TokenInfo
from tests.chat.fakes import FakeBackend, finished, token

FOLDER = Path(__file__).parents[1] / "docs" / "images"
QUESTION = "How do I find the longest word in a file?"
ANSWER = """Read the file word by word and keep the longest one:

```python
def longest_word(path: str) -> str:
    # split() takes any white space
    with open(path, encoding="utf-8") as file:
        return max((w for line in file for w in line.split()), key=len)
```

- `max` with `key=len` needs **one** pass and no list
- an empty file raises `ValueError`: give `default=""`

| file | words | longest |
|------|------:|---------|
| README.md | 812 | documentation |
| notes.txt | 94 | refrigerator |
"""
SENTENCE = """The 62 A 20 In 10|_old 21 _light 44 _sea 15|_light 71 _fisher 12 _man 8|house 98 houses 1|_keeper 83 _stood 6
_had 30 _was 25 _looked 12|_counted 3 _seen 35 _never 22|_seven 2 _the 64 _every 12|_thousand 34 _ships 20 _hundred 11
_nights 5 _ships 51 _waves 20|, 36 _of 30 _and 10|_and 55 _each 20 _but 10|_the 22 _not 30 _every 20|_sea 61 _fog 10
_had 58 _was 20 _never 10|_never 44 _always 20 _kept 10|_once 31 _been 40|_answered 1 _been 50 _lied 8|. 80 _him 12"""
"""tokens in turn: the one that was chosen and others, each with its probability in per cent"""


def tokens(text: str) -> list[TokenInfo]:
    """What SENTENCE and the like describe."""
    infos = []
    for place in text.replace("\n", "|").split("|"):
        words = place.split(" ")
        listed = [
            token(word.replace("_", " "), math.log(int(share) / 100))
            for word, share in zip(words[::2], words[1::2], strict=True)
        ]
        infos.append(TokenInfo(listed[0], tuple(sorted(listed, key=lambda one: -one.logprob))))
    return infos


async def conversation(pilot: Pilot[None]) -> None:
    await say(pilot, QUESTION)


async def thinking(pilot: Pilot[None]) -> None:
    await say(pilot, "Which is larger, 9.11 or 9.9?")
    await pilot.press("shift+tab", "t")


async def history(pilot: Pilot[None]) -> None:
    await pilot.press("ctrl+o")


async def inspector(pilot: Pilot[None]) -> None:
    await say(pilot, "Write the first sentence of a story.")
    await pilot.press("f2", "n")


async def settings(pilot: Pilot[None]) -> None:
    await pilot.press("f3")


async def say(pilot: Pilot[None], text: str) -> None:
    await pilot.press(*text, "enter")
    screen = pilot.app.screen
    assert isinstance(screen, ConversationScreen)
    while screen.busy or len(screen.conversation.turns) < 2:
        await pilot.pause(0.02)


THOUGHTS = "Compare the whole parts first: both are 9. Then the tenths: 1 against 9. So 9.9 is larger."
SCENES: dict[str, tuple[Callable[[Pilot[None]], Awaitable[None]], tuple[int, int], list[Any]]] = {
    "chat": (conversation, (96, 30), [PromptProgress(9, 9), TextDelta(ANSWER), finished(tokens=180)]),
    "chat-40x12": (conversation, (40, 12), [TextDelta("Read it word by word, and keep the longest."), finished()]),
    "thinking": (thinking, (96, 20), [ReasoningDelta(THOUGHTS), TextDelta("**9.9** is larger."), finished(tokens=40)]),
    "history": (history, (96, 26), [finished()]),
    "inspector": (
        inspector,
        (96, 26),
        [*(TextDelta(one.chosen.data.decode(), (one,)) for one in tokens(SENTENCE)), finished(tokens=19)],
    ),
    "settings": (settings, (96, 24), [finished()]),
}


def example_store() -> Store:
    """A few conversations, in memory."""
    store = Store(None)
    for title, tags, pinned in (
        ("Why is the sky blue?", (), False),
        ("Packing list for three days in the Alps", (), False),
        ("Explain the borrow checker", ("rust", "work"), False),
        ("Names for a boat", ("ideas",), True),
    ):
        made = Conversation(title=title, tags=tags, pinned=pinned)
        question = made.add(None, Role.USER, Message.user(title).content)
        store.save_turn(made, question)
        store.save_turn(made, made.add(question.id, Role.ASSISTANT, "…"))
    return store


async def picture(name: str, folder: Path) -> None:
    act, size, script = SCENES[name]
    app = ChatApp(FakeBackend(script, name="smollm2-135m-instruct"), example_store(), Start())
    async with app.run_test(size=size) as pilot:
        await pilot.pause(0.1)
        app.screen.query_one(TextArea).cursor_blink = False
        await act(pilot)
        await pilot.pause(0.2)
        app.save_screenshot(f"{name}.svg", path=str(folder))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCENES:
        asyncio.run(picture(name, folder))


if __name__ == "__main__":
    main()
