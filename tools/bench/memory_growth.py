"""Whether the memory of an engine grows with the requests it has answered: python -m tools.bench.memory_growth [MODEL]

Requests of mixed length and kind, a few at a time, some of them left in the middle. After each the resident memory is read, and
what the KV cache holds of it, which goes up and down with the conversations that are kept. The slope of the medians of
blocks of requests, the first fifth left out, is Theil's and Sen's, with Sen's interval (Sen 1968, Estimates of the
regression coefficient based on Kendall's tau). One JSON line comes last.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from random import Random

from edge_llm import Engine, EngineConfig, Message, SamplingParams
from edge_llm.engine.handle import Handle

TEXT = Path(__file__).parents[1] / "eval" / "english.txt"
_TOGETHER = 4
_BLOCK = 20
_WARM_UP = 0.2
_DEVIATIONS = 1.96
"""of a normal distribution: 95 %"""


@dataclass(frozen=True)
class Slope:
    """Bytes a request, with the bounds of its 95 % interval."""

    bytes_a_request: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.bytes_a_request:+.0f} bytes a request (95 %: {self.low:+.0f} .. {self.high:+.0f})"


def slope(samples: Sequence[float]) -> Slope:
    """Of memory after each request, in bytes; at least 200 of them."""
    settled = samples[int(len(samples) * _WARM_UP) :]
    blocks = [statistics.median(settled[i : i + _BLOCK]) for i in range(0, len(settled) - _BLOCK + 1, _BLOCK)]
    if len(blocks) < 8:
        raise ValueError("too few requests to see a slope")
    slopes = sorted((b - a) / (j - i) / _BLOCK for (i, a), (j, b) in combinations(enumerate(blocks), 2))
    n = len(blocks)
    width = _DEVIATIONS * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, math.floor((len(slopes) - width) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + width) / 2))
    return Slope(statistics.median(slopes), slopes[low], slopes[high])


class Traffic:
    """Requests by a seed."""

    def __init__(self, engine: Engine, text: str, seed: int, longest: int) -> None:
        self._engine, self._text, self._random, self._longest = engine, text, Random(seed), longest

    def start(self) -> Handle:
        """One more: a prompt of 8 to `longest` tokens or so, of all lengths alike on a logarithmic scale."""
        random = self._random
        characters = int(4 * math.exp(random.uniform(math.log(8), math.log(self._longest))))
        begin = random.randrange(max(1, len(self._text) - characters))
        said = self._text[begin : begin + characters]
        params = SamplingParams(
            max_tokens=random.randint(1, 24),
            temperature=random.choice([0.0, 0.7]),
            seed=random.randrange(1 << 32),
            top_logprobs=random.choice([0, 0, 3]),
        )
        if random.random() < 0.5:
            return self._engine.complete(said, params)
        return self._engine.chat([Message.user(said)], params)

    def read(self, handle: Handle) -> None:
        """To its end, or one in ten times only its beginning."""
        if self._random.random() < 0.1:
            next(iter(handle), None)
            handle.cancel()
        for _ in handle:
            pass


def measure(engine: Engine, text: str, *, requests: int, seed: int, longest: int) -> tuple[array[int], array[int]]:
    """Resident bytes after each request, and what of them is no rows of the KV cache."""
    traffic = Traffic(engine, text, seed, longest)
    running: deque[Handle] = deque()
    all_of_it, without_rows = array("q"), array("q")  # lists of numbers would be seen themselves
    for number in range(requests):
        running.append(traffic.start())
        if len(running) == _TOGETHER:
            traffic.read(running.popleft())
        now = engine.statistics()
        if now.rss_bytes is None:
            raise SystemExit("this system does not tell how much memory a process holds")
        all_of_it.append(now.rss_bytes)
        without_rows.append(now.rss_bytes - now.kv_cache_bytes)
        if number % 50 == 49:
            print(f"{number + 1} requests, {now.rss_bytes / 1e6:.1f} MB", file=sys.stderr)
    for handle in running:
        traffic.read(handle)
    return all_of_it, without_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest prompts, about")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    text = TEXT.read_text(encoding="utf-8")
    with Engine.load(options.model, EngineConfig()) as engine:
        found = measure(engine, text, requests=options.requests, seed=options.seed, longest=options.longest)
    resident, rest = map(slope, found)
    print(f"resident memory      {resident}, {found[0][-1] / 1e6:.1f} MB at the end")
    print(f"without rows of KV   {rest}")
    report = {"requests": options.requests, "seed": options.seed, "resident": asdict(resident), "rest": asdict(rest)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
