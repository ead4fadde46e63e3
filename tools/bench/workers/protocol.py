"""How the suite talks to the programs it measures. Standard library only: it also runs where our package is not.

    python -m tools.bench.workers.NAME serve   OPTIONS    answers one measurement a line until its input ends
    python -m tools.bench.workers.NAME answer  OPTIONS    loads the model, answers one prompt, says what memory it took
    python -m tools.bench.workers.NAME prepare OPTIONS    makes the model that the worker wants out of the GGUF file

OPTIONS is a JSON object. Everything that a worker says on stdout is one JSON object a line:

    {"info": {...}}                             first, once the model is loaded
    {"seconds": 0.25} or {"error": "..."}       for each request {"kind": "decode", ...}
    {"missing": true}                           for a kind that this worker does not have
    {"peak_rss": bytes, "tokens": n}            of `answer`; `tokens` counts prompt and answer
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

KINDS = ("prefill", "decode", "batch", "first_token", "sample", "detokenise")
"""what may be asked; each is a method of the worker of that name, but for first_token, which is timed here"""


@dataclass(frozen=True)
class Options:
    """What a worker is started with. `flags` come from peers.toml; `sequences` bounds those of a batch."""

    model: str
    threads: int
    context: int
    sequences: int = 1
    flags: dict[str, Any] = field(default_factory=dict)


class Worker(Protocol):
    """A loaded model. Methods of `KINDS` take the request's other fields by name and give seconds:

        prefill(depth, tokens)              tokens of prompt after `depth` tokens that are there already
        decode(depth, tokens)               that many tokens, one by one
        batch(sequences, depth, tokens)     that many tokens for each of several conversations of `depth` tokens
        sample(text, count, settings)       choosing a token `count` times from the logits that follow `text`;
                                            {} is greedy, else temperature, top_k, top_p, min_p, repetition_penalty
        detokenise(text, count)             the tokens of `text`, again and again until `count` are text
        answer(prompt, max_tokens)          continues a text greedily, from tokenising to the answer's text; gives the
                                            tokens of both (first_token is the time of an answer of one)

    What a program has no way to do is not a method of its worker.
    """

    def info(self) -> dict[str, Any]:
        """Versions, and what the program says about this system."""
        ...


Prepare = Callable[[str, str], None]
"""takes the path of the GGUF file and the path to write to"""


def run(open_worker: Callable[[Options], Worker], prepare: Prepare | None = None) -> None:
    """The main program of a worker."""
    verb, options = sys.argv[1], json.loads(sys.argv[2])
    channel = _own_stdout()
    if verb == "prepare":
        assert prepare is not None, "there is nothing to prepare"
        prepare(options["source"], options["target"])
    elif verb == "answer":
        answering: Any = open_worker(Options(**options["worker"]))
        tokens = answering.answer(options["prompt"], options["max_tokens"])
        _say(channel, {"peak_rss": peak_rss(), "tokens": tokens})
    else:
        worker = open_worker(Options(**options))
        _say(channel, {"info": worker.info()})
        for line in sys.stdin:
            _say(channel, _measure(worker, json.loads(line)))


def token_ids(count: int, vocab: int) -> list[int]:
    """The same random tokens for everybody. Low ids are left out: they are often control tokens."""
    return conversations(1, count, vocab)[0]


def conversations(sequences: int, depth: int, vocab: int) -> list[list[int]]:
    """`depth` such tokens for each conversation of a batch, all of them different."""
    known = range(min(256, vocab - 1), vocab)
    return [random.Random(i).choices(known, k=depth) for i in range(sequences)]


def peak_rss() -> int | None:
    """Most memory that this process has held, in bytes; None where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None


def _measure(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request; a measurement that fails is an answer too."""
    kind = request.pop("kind")
    assert kind in KINDS
    method = getattr(worker, "answer" if kind == "first_token" else kind, None)
    if method is None:
        return {"missing": True}
    try:
        if kind == "first_token":
            start = time.perf_counter()
            method(request["prompt"], 1)
            return {"seconds": time.perf_counter() - start}
        return {"seconds": method(**request)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _own_stdout() -> TextIO:
    """The stdout we were given; what libraries print goes to stderr from now on, so it cannot break the lines."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _say(channel: TextIO, value: dict[str, Any]) -> None:
    channel.write(json.dumps(value) + "\n")
    channel.flush()
