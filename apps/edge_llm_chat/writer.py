"""Writer: the thread that writes to the terminal, also when there is none any more."""

from __future__ import annotations

import contextlib

from textual.drivers._writer_thread import WriterThread


class Writer(WriterThread):
    """Textual's own dies of the first write that fails. Nobody takes anything out of its queue then, and the program, the model
    in its memory, waits for ever to put its last words into it: when a window is closed while an answer comes.
    """

    def run(self) -> None:
        while (text := self._queue.get()) is not None:
            with contextlib.suppress(OSError):
                self._file.write(text)
                if self._queue.qsize() == 0:
                    self._file.flush()
        with contextlib.suppress(OSError):
            self._file.flush()
