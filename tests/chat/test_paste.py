from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest
from edge_llm_chat import paste
from edge_llm_chat.paste import MOST_PASTED, SILENCE_S, PasteCut, PasteParser
from edge_llm_chat.store import Store
from textual import events
from textual.message import Message

from tests.chat.conftest import chat, screen_of, settle, shown, wait_until
from tests.chat.fakes import FakeBackend
from tests.cli.conftest import ROOT
from tests.cli.test_terminal import FOREIGN, Terminal

BEGIN, END = "\x1b[200~", "\x1b[201~"
LOG = (
    "\x1b[31mred\x1b[0m\rnext \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 \x1b\x1b[201 \x1b[200~ \x00\x9b\x7f\u202e end\x1b"
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def read(*pieces: str) -> list[Message]:
    parser = PasteParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def told(found: list[Message]) -> list[str]:
    return [event.text if isinstance(event, events.Paste) else getattr(event, "key", repr(event)) for event in found]


def test_a_paste_arrives_whole_wherever_it_is_cut() -> None:
    data = f"a{BEGIN}{LOG}{END}b\x1b[A{BEGIN}{END}{BEGIN}two{END}"
    whole = told(read(data))
    assert whole[:1] + whole[2:] == ["a", "b", "up", "", "two"]
    assert whole[1].startswith("red\nnext link ")
    assert whole[1].endswith(" end␛")
    assert not FOREIGN.search(whole[1])
    for cut in range(1, len(data)):
        assert told(read(data[:cut], data[cut:])) == whole, cut
    assert told(read(*data)) == whole
    draw = random.Random(3)
    for _ in range(50):
        cuts = sorted(draw.sample(range(1, len(data)), 6))
        assert told(read(*(data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)))) == whole


def test_keys_and_marks_outside_of_a_paste_are_textuals() -> None:
    assert told(read("\x1b[A", END, "x", "\x1b[2~", "\x1b[I"))[:3] == ["up", "x", "insert"]
    assert told(read("\x1b", BEGIN, "p", END, "q")) == ["escape", "p", "q"]


def test_a_mark_that_came_slowly_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = PasteParser()
    monkeypatch.setattr("textual._parser.get_time", lambda: 1e12)
    found = [*parser.feed("\x1b[20"), *parser.tick(), *parser.feed(f"0~one\rtwo{END}"), *parser.feed("z")]
    assert told(found)[-2:] == ["one\ntwo", "z"]
    assert "enter" not in told(found)


def test_a_paste_without_an_end_is_over_after_some_silence() -> None:
    clock = Clock()
    parser = PasteParser(clock=clock)
    assert told([*parser.feed(f"{BEGIN}some text\x1b[20")]) == []
    clock.now = SILENCE_S / 2
    assert told([*parser.tick(), *parser.feed("1")]) == []
    clock.now = SILENCE_S * 1.4
    assert told([*parser.tick()]) == []
    clock.now = SILENCE_S * 1.6
    assert told([*parser.tick()]) == ["some text␛[201"]
    assert told([*parser.feed("\x11")]) == ["ctrl+q"]


def test_an_endless_paste_takes_no_more_memory_and_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paste, "MOST_PASTED", 10)
    parser = PasteParser()
    found = [*parser.feed(BEGIN)]
    for _ in range(1000):
        found += parser.feed("123456")
    assert parser._pieces is not None
    assert sum(map(len, parser._pieces)) == 10
    assert len(parser._pieces) < 5
    found += parser.feed(END)
    assert isinstance(found[-1], PasteCut)
    assert told(found[:-1]) == ["1234561234"]
    assert told([*parser.feed(f"{BEGIN}1234567890{END}")]) == ["1234567890"], "as much as there may be"


def test_that_a_paste_was_cut_is_said() -> None:
    async def body() -> None:
        async with chat(FakeBackend()) as pilot:
            await settle(pilot)
            pilot.app.post_message(PasteCut())
            await wait_until(lambda: f"{MOST_PASTED:,} characters" in " ".join(shown(pilot).split()), pilot)
            assert screen_of(pilot).composer.text == ""

    asyncio.run(body())


def test_through_a_terminal(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 KB of a coloured log, in one question."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'apps'}{os.pathsep}{ROOT}")
    line = "\x1b[31mERROR\x1b[0m something \x1b[1mbold\x1b[22m went wrong"
    with Terminal([sys.executable, "-m", "tests.chat.session"], TERM="xterm-256color") as terminal:
        terminal.read_until("sk anything")  # the cursor is on the first letter: it has the focus
        terminal.type(BEGIN)
        for _ in range(1_500):
            terminal.type(line + "\r")
        terminal.type(END)
        terminal.read_until("something")
        terminal.type("\r")
        terminal.read_until("ANSWERED")
        terminal.type("\x11")
        assert terminal.finish() == 0
    asked = ["ERROR something bold went wrong"] * 1_500
    store = Store.open()
    (summary,) = store.find()
    question, answer = store.load(summary.id).path()
    assert question.content.split("\n") == asked
    assert answer.content == "ANSWERED"
