"""An engine that says what it is told to, behind the real command line: `python -m tests.cli.stub SPEC ARGUMENT...`.

SPEC is JSON: the arguments of StubEngine.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace

from edge_llm_cli.answer import EngineOptions

from edge_llm import errors
from edge_llm.engine.handle import Handle, Mailbox
from edge_llm.errors import ContextLengthError
from edge_llm.messages import Beam, Choice, Finished, FinishReason, Message, TextDelta, Timings, Usage
from edge_llm.sampling.params import SamplingParams


class Cancellation:
    """A flag as the engine's own: a signal may set it while it is being set, which an Event would wait for."""

    asked = False

    def ask(self) -> None:
        self.asked = True


class StubEngine:
    """Answers every request with `pieces`, `delay` seconds apart, then maybe the error `fail`.

    A request of more than `limit` characters is too long; `asked` keeps them all, `options` what the engine was opened
    with. Of what is asked, all characters but the last `seen` are forgotten, and with them the messages before.
    """

    info = SimpleNamespace(name="stub", context=64)

    def __init__(
        self,
        pieces: list[str],
        *,
        times: int = 1,
        delay: float = 0.0,
        fail: str | None = None,
        limit: int = 10**9,
        seen: int = 10**9,
        announce: int = 0,
    ) -> None:
        self.pieces, self.delay, self.fail, self.limit, self.seen = pieces * times, delay, fail, limit, seen
        self.announce = announce  # after so many pieces a line on stderr says so
        self.options: EngineOptions | None = None
        self.choices: tuple[Choice, ...] = ()
        self.beams: tuple[Beam, ...] = ()
        self.asked: list[tuple[list[Message] | str, SamplingParams]] = []
        self.requested: list[dict[str, object]] = []

    def chat(self, messages: list[Message], params: SamplingParams, **options: object) -> Handle:
        self.requested.append(options)
        return self._start(list(messages), params, sum(len(message.content) for message in messages))

    def complete(self, text: str, params: SamplingParams, **options: object) -> Handle:
        self.requested.append(options)
        return self._start(text, params, len(text))

    def reply(self, text: str, finished: Finished) -> Message:
        return Message.assistant(text)

    def _start(self, request: list[Message] | str, params: SamplingParams, size: int) -> Handle:
        self.asked.append((request, params))
        if size > self.limit:
            raise ContextLengthError(size, self.limit)
        mailbox, cancellation = Mailbox(), Cancellation()
        ends = accumulate(len(message.content) for message in request) if isinstance(request, list) else ()
        self.forgotten_tokens = max(0, size - self.seen)
        self.forgotten = tuple(index for index, end in enumerate(ends) if end <= self.forgotten_tokens)
        threading.Thread(target=self._say, args=(mailbox, cancellation, params), daemon=True).start()
        return Handle(mailbox, cancellation.ask)

    def _say(self, mailbox: Mailbox, cancellation: Cancellation, params: SamplingParams) -> None:
        said = 0
        for piece in self.pieces:
            time.sleep(self.delay)
            if cancellation.asked:
                break
            mailbox.put(TextDelta(piece))
            said += 1
            if said == self.announce:
                os.write(2, b"ready\n")
        if self.fail is not None:
            mailbox.put(getattr(errors, self.fail)("it went wrong", hint="do it right"))
            return
        reason = FinishReason.CANCELLED if cancellation.asked else FinishReason.STOP
        timings = Timings(0.0, 0.01, 0.1, 1000.0, 200.0, 0.005)
        seed = 5 if params.seed is None else params.seed
        usage = Usage(7, said, 2)
        forgotten = {"forgotten": self.forgotten, "forgotten_tokens": self.forgotten_tokens}
        mailbox.put(Finished(reason, usage, timings, seed, choices=self.choices, beams=self.beams, **forgotten))


def opener(engine: StubEngine):
    @contextlib.contextmanager
    def opened(model: str, options: EngineOptions) -> Iterator[tuple[StubEngine, float]]:
        engine.options = options
        yield engine, 0.25

    return opened


if __name__ == "__main__":
    from edge_llm_cli import answer, main

    answer.opened = opener(StubEngine(**json.loads(sys.argv[1])))
    sys.argv[1:] = sys.argv[2:]
    main.run()
