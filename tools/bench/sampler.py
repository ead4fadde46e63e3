"""What choosing a token costs: `python -m tools.bench.sampler`.

Rows of random logits (normal, spread 3) go through whole requests, Python included. Each figure is the least of ROUNDS
medians of CALLS calls, in microseconds of the thread's CPU time: other jobs of a shared machine only ever add, and while they
run instead of us the clock stands. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np

from edge_llm.kernels.warmup import load_kernels
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler, SequenceSampler

ROUNDS, CALLS = 10, 60
VOCABULARIES = (49_152, 262_144)
PENALTIES = {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.1, "dry_multiplier": 0.8}
FULL: dict[str, Any] = {
    **PENALTIES,
    "logit_bias": {5: 1.0, 77: -100.0},
    "top_n_sigma": 2.0,
    "temperature": 0.8,
    "top_k": 40,
    "typical_p": 0.95,
    "top_p": 0.95,
    "min_p": 0.05,
    "xtc_probability": 0.5,
}
CHAINS: dict[str, tuple[dict[str, Any], bool]] = {
    "greedy": ({"temperature": 0.0}, False),
    "greedy, penalties and DRY": ({"temperature": 0.0, **PENALTIES}, False),
    "temperature 0.8, top-k 40, top-p 0.95, min-p 0.05": (
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        False,
    ),
    "temperature 1, top-n-sigma 1": ({"temperature": 1.0, "top_n_sigma": 1.0}, False),
    "temperature 1, top-p 0.9": ({"temperature": 1.0, "top_p": 0.9}, False),
    "temperature 1, typical 0.9": ({"temperature": 1.0, "typical_p": 0.9}, False),
    "temperature 1, mirostat": ({"temperature": 1.0, "mirostat_tau": 5.0}, False),
    "full chain with mask": (FULL, True),
    "full chain with mask, no top-k": ({**FULL, "top_k": 0}, True),
    "full chain with mask, no top-k, no top-n-sigma": ({**FULL, "top_k": 0, "top_n_sigma": 0.0}, True),
}
"""options of each, and whether a grammar's mask is on"""
BARS = {
    ("greedy", 49_152): 30,
    ("full chain with mask", 49_152): 150,
    ("eight full chains with mask", 49_152): 600,
    ("full chain with mask", 262_144): 700,
}
"""microseconds that are allowed"""


def request(sampler: Sampler, options: dict[str, Any], seed: int) -> SequenceSampler:
    """A request in the middle of its answer: 2,000 tokens of prompt of which 600 are distinct, and 200 of answer."""
    ids = np.random.default_rng(seed).integers(0, 600, 2200).tolist()
    sequence = sampler.sequence(SamplingParams(seed=seed, **options), ids[:2000], lambda _: b"word")
    for token_id in ids[2000:]:
        sequence.observe(token_id)
    return sequence


def least_median(sequences: list[SequenceSampler], rows: np.ndarray, mask: np.ndarray | None) -> float:
    """CPU seconds in which each of `sequences` samples its row."""
    medians = []
    for _ in range(ROUNDS):
        times = []
        for index in range(CALLS):
            started = time.thread_time()
            for sequence, row in zip(sequences, rows, strict=True):
                sequence.sample(row, index, mask)
            times.append(time.thread_time() - started)
        medians.append(statistics.median(times))
    return min(medians)


def main() -> None:
    kernels = load_kernels()
    results = []
    for vocab in VOCABULARIES:
        sampler = Sampler(kernels, vocab)
        rows = np.random.default_rng(0).normal(0, 3, (8, vocab)).astype(np.float32)
        allowed = np.random.default_rng(1).integers(-(2**31), 2**31, (vocab + 31) // 32).astype(np.int32)
        for name, (options, masked) in CHAINS.items():
            mask = allowed if masked else None
            results.append((name, vocab, least_median([request(sampler, options, 0)], rows[:1], mask)))
        eight = [request(sampler, FULL, seed) for seed in range(8)]
        results.append(("eight full chains with mask", vocab, least_median(eight, rows, allowed)))
    for name, vocab, seconds in results:
        bar = BARS.get((name, vocab))
        print(f"{vocab:>8,} {name:52} {seconds * 1e6:8.1f}" + (f"   at most {bar}" if bar else ""))
    print(json.dumps([{"chain": name, "vocab": vocab, "us": round(s * 1e6, 1)} for name, vocab, s in results]))


if __name__ == "__main__":
    main()
