"""What drafts are worth: `python -m tools.eval.speculation MODEL [--speculate draft:MODEL] [--prompts FILE.jsonl]`.

Each prompt (default: copying.jsonl, answers that repeat much of the prompt) is answered with and without drafts, one after
the other in alternating order, with the same seed. Told: the ratio of decode speeds, the share of drafts that were right, and the
rows that were computed for nothing. The answers must be equal. One JSON line comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from edge_llm.config import EngineConfig
from edge_llm.engine.engine import Engine
from edge_llm.messages import Finished, Message
from edge_llm.sampling.params import SamplingParams

PROMPTS = Path(__file__).with_name("copying.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="one JSON object with kind and prompt a line")
    parser.add_argument("--speculate", default="lookup", help="lookup, or draft:MODEL")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cases = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=1)
    plain = EngineConfig(slots=1, prefix_cache="off", speculation="off")
    with (
        Engine.load(options.model, plain) as without,
        Engine.load(options.model, plain.with_options(speculation=options.speculate)) as with_drafts,
    ):
        results = [_compare(without, with_drafts, case, params, options.rounds) for case in cases]
    for case, result in zip(cases, results, strict=True):
        print(
            f"{result['ratio']:5.2f}x  {case['kind']:10} {result['accepted']:4d} of {result['drafts']:4d} drafts right"
        )
    tokens, steps = (sum(result[name] for result in results) for name in ("tokens", "steps"))
    drafts, accepted = (sum(result[name] for result in results) for name in ("drafts", "accepted"))
    summary = {
        "prompts": len(cases),
        "equal": sum(result["equal"] for result in results),
        "decode_ratio": sum(result["plain_s"] for result in results) / sum(result["drafting_s"] for result in results),
        "median_ratio": statistics.median(result["ratio"] for result in results),
        "tokens": tokens,
        "steps": steps,
        "drafts": drafts,
        "accepted": accepted,
        "extra_rows": (drafts - accepted) / tokens,
    }
    print(json.dumps(summary))
    return 0 if summary["equal"] == len(cases) else 1


def _compare(
    without: Engine, with_drafts: Engine, case: dict[str, str], params: SamplingParams, rounds: int
) -> dict[str, float]:
    """Medians of both ways of answering one prompt."""
    seconds: dict[Engine, list[float]] = {without: [], with_drafts: []}
    ends: dict[Engine, Finished] = {}
    for turn in range(rounds):
        for engine in (without, with_drafts) if turn % 2 else (with_drafts, without):
            ends[engine] = _answer(engine, case["prompt"], params)
            seconds[engine].append(ends[engine].timings.tpot_s or 0.0)
    plain, drafting = ends[without], ends[with_drafts]
    tokens = plain.usage.completion_tokens
    plain_s, drafting_s = (tokens * statistics.median(seconds[engine]) for engine in (without, with_drafts))
    return {
        "equal": plain.token_ids == drafting.token_ids,
        "ratio": plain_s / drafting_s if drafting_s else 1.0,
        "plain_s": plain_s,
        "drafting_s": drafting_s,
        "tokens": tokens,
        "steps": tokens - drafting.usage.accepted_draft_tokens,
        "drafts": drafting.usage.draft_tokens,
        "accepted": drafting.usage.accepted_draft_tokens,
    }


def _answer(engine: Engine, prompt: str, params: SamplingParams) -> Finished:
    handle = engine.chat([Message.user(prompt)], params)
    handle.text()
    assert handle.finished is not None
    return handle.finished


if __name__ == "__main__":
    sys.exit(main())
