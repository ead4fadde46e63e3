"""What is measured: a Cell is one row of a table, asked of every worker in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SAMPLING = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


class Unit(Enum):
    """What a figure counts."""

    RATE = "tokens/s"
    MILLISECONDS = "ms"
    MICROSECONDS = "us a token"
    MEGABYTES = "MB"

    def figure(self, seconds: float, count: int) -> float:
        """The figure for `seconds` that `count` tokens took."""
        match self:
            case Unit.RATE:
                return count / seconds
            case Unit.MILLISECONDS:
                return 1e3 * seconds
            case Unit.MICROSECONDS:
                return 1e6 * seconds / count
        raise ValueError(f"{self} is no measure of time")

    def advantage(self, ours: float, theirs: float) -> float:
        """How many times as good the first figure is as the second: of all but rates, less is better."""
        return ours / theirs if self is Unit.RATE else theirs / ours


@dataclass(frozen=True)
class Cell:
    """A request to the workers; `count` tokens are done by it, `rounds` times by each."""

    section: str
    label: str
    kind: str
    arguments: Mapping[str, Any]
    count: int
    rounds: int
    unit: Unit = Unit.RATE
    warm: Mapping[str, Any] = field(default_factory=dict)
    """arguments that the untimed first request has other values for"""

    def request(self, *, warm_up: bool = False) -> dict[str, Any]:
        return {"kind": self.kind, **self.arguments, **(self.warm if warm_up else {})}

    @property
    def room(self) -> int:
        """Tokens of context that it needs."""
        return int(self.arguments.get("depth", 0)) + int(self.arguments.get("tokens", 0))


def decode(depth: int, tokens: int, rounds: int) -> Cell:
    arguments = {"depth": depth, "tokens": tokens}
    return Cell("decode", f"@ {depth}", "decode", arguments, tokens, rounds, warm={"tokens": 2})


def prefill(tokens: int, rounds: int) -> Cell:
    arguments = {"depth": 0, "tokens": tokens}
    return Cell("prefill", str(tokens), "prefill", arguments, tokens, rounds, warm={"tokens": min(tokens, 64)})


def batch(sequences: int, tokens: int, rounds: int) -> Cell:
    arguments = {"sequences": sequences, "depth": 128, "tokens": tokens}
    label = f"{sequences} @ 128"
    return Cell("batched decode", label, "batch", arguments, sequences * tokens, rounds, warm={"tokens": 2})


def first_token(prompt: str, prompt_tokens: int, rounds: int) -> Cell:
    label = f"prompt of {prompt_tokens}"
    arguments = {"prompt": prompt}
    return Cell("first token", label, "first_token", arguments, prompt_tokens, rounds, Unit.MILLISECONDS)


def text_cells(text: str, rounds: int) -> Iterator[Cell]:
    """The work on one token beside the model."""
    for label, settings in (("sampler, greedy", {}), ("sampler, full chain", SAMPLING)):
        arguments = {"text": text, "count": 200, "settings": settings}
        yield Cell("a token's text", label, "sample", arguments, 200, rounds, Unit.MICROSECONDS)
    arguments = {"text": text, "count": 4000}
    yield Cell("a token's text", "detokeniser", "detokenise", arguments, 4000, rounds, Unit.MICROSECONDS)


def all_threads(prompts: Mapping[int, str], rounds: int) -> list[Cell]:
    """The whole suite, by growing depth, so that a worker never computes a context twice. `prompts` by their tokens."""
    few = min(3, rounds)
    short = prompts[min(prompts)]
    return [
        *(decode(depth, 48, rounds) for depth in (16, 128, 512)),
        *(decode(depth, 32, rounds) for depth in (2048, 4096)),
        decode(8000, 24, rounds),
        *(prefill(tokens, rounds) for tokens in (64, 512)),
        *(prefill(tokens, few) for tokens in (2048, 4096)),
        *(batch(sequences, 32, few) for sequences in (1, 2, 4, 8, 16)),
        *(first_token(prompt, tokens, rounds) for tokens, prompt in prompts.items()),
        *text_cells(short, rounds),
    ]


def one_thread(rounds: int) -> list[Cell]:
    return [decode(128, 32, rounds), decode(2048, 16, rounds), prefill(512, rounds), batch(8, 16, min(3, rounds))]


def quick(prompts: Mapping[int, str]) -> list[Cell]:
    """A little of everything in a minute, to see that it works: figures of one round mean nothing."""
    tokens = min(prompts)
    return [
        *(decode(depth, 8, 1) for depth in (16, 128)),
        prefill(64, 1),
        *(batch(sequences, 4, 1) for sequences in (1, 2)),
        first_token(prompts[tokens], tokens, 1),
        *text_cells(prompts[tokens], 1),
    ]
