"""From token ids to text as they come, one decoder a request."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container


class Detokenizer:
    """Text of a growing answer. The deltas joined are exactly the text of all ids decoded at once.

    `token_bytes` gives the bytes of an id; ids in `silent` give nothing. Characters whose bytes lie in several tokens
    wait until they are whole; bytes that can never become a character give U+FFFD, as `bytes.decode(errors="replace")`
    gives it. The cost of a token does not grow with the answer.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], silent: Container[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._silent = silent
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that one more token completes, maybe empty."""
        return "" if token_id in self._silent else self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the answer stops inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
