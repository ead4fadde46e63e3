"""Serving: what many conversations on one engine get, measured through the door that all callers use.

    python -m tools.bench.serving [MODEL] [--case chats|interference|overload]... [--rounds N] [--json]

chats         eight chats of different lengths at once: tokens a second together, beside one chat alone; tokens as alone
interference  a prompt of 4,000 tokens is read while a chat runs: gaps between its tokens, and when the prompt's first comes
overload      fifty times as many requests as fit: what is accepted is answered, what is not is refused at once

Each figure is measured alternately with what it is compared with. docs/scheduling.md says how to read them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise

from edge_llm.config import EngineConfig
from edge_llm.engine.engine import Engine
from edge_llm.engine.handle import Handle
from edge_llm.engine.request import Request
from edge_llm.errors import QueueFullError
from edge_llm.messages import Finished, TextDelta
from edge_llm.sampling.params import SamplingParams
from tools.bench.suite import DEFAULT_MODEL
from tools.bench.worker_process import ROOT

_TEXT = ROOT / "tools" / "eval" / "english.txt"
_CHATS = 8
_CHAT_TOKENS = 256
_PROMPT_TOKENS = 4000
_OVERLOAD = 50


@dataclass(frozen=True)
class Chats:
    """Tokens a second, `together` while all are being answered (None: one had ended before another's prompt was read)."""

    alone: float
    together: float | None
    same_tokens: bool


@dataclass(frozen=True)
class Interference:
    """Milliseconds between a chat's tokens, and seconds to a long prompt's first token."""

    gap_alone_median_ms: float
    gap_p50_ms: float
    gap_p95_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    ttft_alone_s: float
    ttft_s: float

    @property
    def ratios(self) -> tuple[float, float]:
        """95th percentile of the gaps over the median without the prompt; first token over the one alone."""
        return self.gap_p95_ms / self.gap_alone_median_ms, self.ttft_s / self.ttft_alone_s


@dataclass(frozen=True)
class Overload:
    offered: int
    accepted: int
    answered_as_alone: int
    refusal_p50_ms: float
    refusal_p99_ms: float
    refusal_max_ms: float
    seconds: float


class Bench:
    """Measurements on one engine, which nobody else uses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        text = _TEXT.read_text("utf-8")
        ids = engine.tokenize(Request.completion(text))
        self._ids = ids * (_PROMPT_TOKENS * 2 // len(ids) + 1)

    def chats(self) -> Chats:
        """Different prompts of 16 to 500 tokens, each alone and all together."""
        requests = [self._request(40 * i, 16 + 69 * i, _CHAT_TOKENS) for i in range(_CHATS)]
        alone, alone_s = [], []
        for request in requests:
            times, finished = self._read(self._engine.submit(request))
            alone.append(finished.token_ids)
            alone_s.append((times[-1] - times[0]) / (len(times) - 1))
        with ThreadPoolExecutor(_CHATS) as pool:
            results = list(pool.map(lambda request: self._read(self._engine.submit(request)), requests))
        # from the moment when the last of them is answered to that when the first has ended: all are being answered
        start, stop = max(times[0] for times, _ in results), min(times[-1] for times, _ in results)
        tokens = sum(start < moment <= stop for times, _ in results for moment in times)
        same = [finished.token_ids for _, finished in results] == alone
        together = tokens / (stop - start) if stop > start else None
        return Chats(1 / statistics.median(alone_s), together, same)

    def interference(self) -> Interference:
        """One round: the chat alone, the prompt alone, both."""
        alone, _ = self._read(self._engine.submit(self._request(0, 200, 200)))
        ttft_alone = self._ttft(_PROMPT_TOKENS)
        chat = self._engine.submit(self._request(0, 200, 4000))
        times: list[float] = []
        reader = threading.Thread(target=lambda: times.extend(self._read(chat)[0]))
        reader.start()
        time.sleep(0.3)
        start = time.perf_counter()
        ttft = self._ttft(_PROMPT_TOKENS)
        stop = time.perf_counter()
        chat.cancel()
        reader.join()
        gaps = sorted(_gaps([moment for moment in times if start <= moment <= stop]))
        return Interference(
            gap_alone_median_ms=statistics.median(_gaps(alone)),
            gap_p50_ms=_quantile(gaps, 0.5),
            gap_p95_ms=_quantile(gaps, 0.95),
            gap_p99_ms=_quantile(gaps, 0.99),
            gap_max_ms=gaps[-1],
            ttft_alone_s=ttft_alone,
            ttft_s=ttft,
        )

    def overload(self) -> Overload:
        """Fifty times what slots and queue hold, from many threads, as fast as they can."""
        capacity = self._engine.info.slots + EngineConfig().queue_limit
        requests = [self._request(7 * (i % 16), 20 + 10 * (i % 16), 16) for i in range(_OVERLOAD * capacity)]
        alone = [self._read(self._engine.submit(request))[1].token_ids for request in requests[:16]]
        refusals: list[float] = []

        def press(i: int) -> bool | None:
            start = time.perf_counter()
            try:
                handle = self._engine.submit(requests[i])
            except QueueFullError:
                refusals.append(time.perf_counter() - start)
                return None
            return self._read(handle)[1].token_ids == alone[i % 16]

        began = time.perf_counter()
        with ThreadPoolExecutor(2 * capacity) as pool:
            results = [result for result in pool.map(press, range(len(requests))) if result is not None]
        seconds = time.perf_counter() - began
        refusals = sorted(refusals) or [0.0]  # a slow caller is never refused
        return Overload(
            offered=len(requests),
            accepted=len(results),
            answered_as_alone=sum(results),
            refusal_p50_ms=1e3 * _quantile(refusals, 0.5),
            refusal_p99_ms=1e3 * _quantile(refusals, 0.99),
            refusal_max_ms=1e3 * refusals[-1],
            seconds=seconds,
        )

    def _request(self, begin: int, tokens: int, answer: int) -> Request:
        params = SamplingParams(temperature=0.7, seed=begin, max_tokens=answer, ignore_eos=True)
        return Request(token_ids=tuple(self._ids[begin : begin + tokens]), params=params, cache=False)

    def _ttft(self, tokens: int) -> float:
        finished = self._read(self._engine.submit(self._request(1000, tokens, 1)))[1]
        assert finished.timings.ttft_s is not None
        return finished.timings.ttft_s

    @staticmethod
    def _read(handle: Handle) -> tuple[list[float], Finished]:
        """When its texts came, to whoever reads them; a token may have none, so they are a little fewer."""
        times = [time.perf_counter() for event in handle if isinstance(event, TextDelta)]
        assert handle.finished is not None
        return times, handle.finished


def _gaps(times: list[float]) -> list[float]:
    return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


def _quantile(ascending: list[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(len(ascending) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.serving", description=(__doc__ or "").splitlines()[0])
    cases = ("chats", "interference", "overload")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--case", action="append", choices=cases, help="default: all of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    options = parser.parse_args()
    print(f"load of this machine: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    document: dict[str, object] = {"load": os.getloadavg()[0]}
    config = EngineConfig(context=8192, prefix_cache="off", speculation="off")  # each step gives one token
    with Engine.load(options.model, config) as engine:
        bench = Bench(engine)
        for case in options.case or cases:
            rounds = [getattr(bench, case)() for _ in range(1 if case == "overload" else options.rounds)]
            document[case] = [asdict(one) for one in rounds]
            if not options.json:
                print(case, *rounds, sep="\n  ")
            if case == "interference":
                ratios = [statistics.median(values) for values in zip(*(one.ratios for one in rounds), strict=True)]
                document["ratios"] = {"gap_p95": ratios[0], "ttft": ratios[1]}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
