"""Finding a marker in text that comes in chunks, and holding white space back that may have to go."""

from __future__ import annotations


def cut(text: str, marker: str) -> tuple[str, str, bool]:
    """(text before the first `marker`, text after it, True); without one (text that is none of it, an end of the text that
    may become one, False)."""
    before, found, after = text.partition(marker)
    if found:
        return before, after, True
    longest = min(len(marker) - 1, len(text))
    held = next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
    return text[: len(text) - held], text[len(text) - held :], False


class TrailingSpace:
    """Passes text on, and keeps white space at its end until more text or `drop` comes."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        kept = text.rstrip()
        if not kept:
            if text:
                self._held.append(text)
            return ""
        passed = "".join((*self._held, kept))
        self._held = [text[len(kept) :]]
        return passed

    def drop(self) -> None:
        self._held = []

    def flush(self) -> str:
        held = "".join(self._held)
        self._held = []
        return held
