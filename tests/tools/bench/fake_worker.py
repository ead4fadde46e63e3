"""A program that the suite can measure without a model; its flags say what goes wrong."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench.workers import protocol


class FakeWorker:
    """Flags: `log`, a file to which each request adds a line; `dies`, `hangs`, `fails`: a kind at which it does;
    `refuses`: it does not start; `speed` in tokens a second."""

    def __init__(self, options: protocol.Options) -> None:
        os.write(1, b"a library says hello\n")
        self.options, self.flags = options, options.flags
        if self.flags.get("refuses"):
            sys.stderr.write("first line\nno such model\n")
            sys.exit(3)

    def info(self) -> dict[str, Any]:
        sys.stdout.write("hello again\n")
        return {"threads": self.options.threads, "model": self.options.model}

    def prefill(self, depth: int, tokens: int) -> float:
        return self._done("prefill", tokens)

    def decode(self, depth: int, tokens: int) -> float:
        return self._done("decode", tokens)

    def answer(self, prompt: str, max_tokens: int) -> int:
        self._done("answer", max_tokens)
        return len(prompt) + max_tokens

    def _done(self, kind: str, tokens: int) -> float:
        if "log" in self.flags:
            with open(self.flags["log"], "a") as log:
                log.write(f"{self.options.model} {kind} {tokens}\n")
        if self.flags.get("fails") == kind:
            raise ValueError("out of luck")
        if self.flags.get("dies") == kind:
            os._exit(7)
        if self.flags.get("hangs") == kind:
            time.sleep(60)
        return tokens / self.flags.get("speed", 100)


def prepare(source: str, target: str) -> None:
    data = Path(source).read_bytes()
    if not data:
        Path(target).write_bytes(b"half of it")
        raise ValueError("the file is empty")
    Path(target).write_bytes(data[::-1])


if __name__ == "__main__":
    protocol.run(FakeWorker, prepare)
