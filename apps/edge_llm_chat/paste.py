"""PasteParser: a bracketed paste arrives whole and harmless, whatever it holds and however it is cut into reads.

Textual's own parser looks for keys inside a paste too, and loses its way at the first ESC of a coloured log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator

from textual import events
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.message import Message

from edge_llm.text.terminal import clean

MOST_PASTED = 1 << 18
"""characters of one paste; what is beyond is dropped, and that is said"""
SILENCE_S = 5.0
"""an end that has not come by then is lost; to wait for ever would leave the keyboard dead"""
_TAIL = len(BRACKETED_PASTE_END) - 1
# ECMA-48: control sequences (colours), and strings that end with BEL or ST (titles, links)
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)")


class PasteCut(Message):
    """A paste was longer than `MOST_PASTED`."""


class PasteParser(XTermParser):
    """Takes the pastes out of what a terminal sends, and leaves the rest to Textual. `clock` gives seconds."""

    def __init__(self, debug: bool = False, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(debug)
        self._clock = clock
        self._tail = ""  # the last characters, where a mark may have begun; of a paste they are not yet in the pieces
        self._pieces: list[str] | None = None  # of the paste that is coming
        self._length = 0
        self._heard = 0.0

    def feed(self, data: str) -> Iterable[Message]:
        if not data:  # the end of all input
            yield from super().feed(data)
        self._heard = self._clock()
        while data:
            seen = self._tail + data
            pasting = self._pieces is not None
            before, mark, after = seen.partition(BRACKETED_PASTE_END if pasting else BRACKETED_PASTE_START)
            self._tail = "" if mark else seen[-_TAIL:]
            if pasting:
                self._keep(before if mark else seen[:-_TAIL])
                yield from self._end() if mark else ()
            else:
                yield from super().feed(data[: len(data) - len(after)] if mark else data)
                yield from self._begin() if mark else ()
            data = after

    def tick(self) -> Iterable[Message]:
        yield from super().tick()
        if self._pieces is not None and self._clock() - self._heard >= SILENCE_S:
            self._keep(self._tail)
            self._tail = ""
            yield from self._end()

    def _begin(self) -> Iterator[Message]:
        self._pieces, self._length = [], 0
        # Textual has seen the mark: without the other it would take all that follows for a paste
        for event in super().feed(BRACKETED_PASTE_END):
            if not isinstance(event, events.Paste):
                yield event

    def _keep(self, text: str) -> None:
        room = MOST_PASTED - self._length
        self._length += len(text)
        if room > 0 and self._pieces is not None:
            self._pieces.append(text[:room])

    def _end(self) -> Iterator[Message]:
        text, self._pieces = "".join(self._pieces or ()), None
        yield events.Paste(harmless(text))
        if self._length > MOST_PASTED:
            yield PasteCut()


def harmless(text: str) -> str:
    """`text` without the sequences that only a terminal understands; other controls are shown, as `clean` does."""
    return clean(_SEQUENCE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
