"""How structured decoding does on a real model: `python -m tools.eval.structured MODEL [--seeds 10]`.

Every prompt of schemas.jsonl is answered at temperature 1 with several seeds. Counted: answers that end by themselves, those
of them that `jsonschema` finds valid, and how much of the time goes into masks and sampling. One JSON line comes last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from edge_llm.config import EngineConfig
from edge_llm.engine.engine import Engine
from edge_llm.messages import FinishReason, Message
from edge_llm.sampling.decoders import GrammarDecoder
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams

SCHEMAS = Path(__file__).with_name("schemas.jsonl")
MAX_TOKENS = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    cases = [json.loads(line, parse_float=Decimal) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]
    choosing = _Clock()
    GrammarDecoder.select = choosing.around(GrammarDecoder.select)  # type: ignore[method-assign]
    with Engine.load(options.model, EngineConfig(context=1024)) as engine:
        results = [_answer(engine, case, seed) for case in cases for seed in range(options.seeds)]
    finished = [result for result in results if result["finished"]]
    valid = sum(result["valid"] for result in finished)
    decode_s = sum(result["decode_s"] for result in results)
    tokens = sum(result["tokens"] for result in results)
    summary = {
        "schemas": len(cases),
        "answers": len(results),
        "finished": len(finished),
        "valid": valid,
        "tokens": tokens,
        "sampled": choosing.calls,
        "choosing_share": choosing.seconds / decode_s,
    }
    for case in cases:
        own = [result for result in results if result["prompt"] == case["prompt"]]
        print(f"{sum(r['finished'] for r in own):3d} of {len(own)} finished, {own[0]['text'][:90]}")
    print(json.dumps(summary))
    return 0 if valid == len(finished) else 1


class _Clock:
    """Seconds and calls of a method."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def around(self, method: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        return timed


def _answer(engine: Engine, case: dict[str, Any], seed: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, top_p=1.0, repetition_penalty=1.0, seed=seed)
    message = Message.user(f"{case['prompt']} Answer in JSON.")
    handle = engine.chat(
        [message], params, response_format=Grammar.json_schema(json.dumps(case["schema"], default=float))
    )
    text = handle.text()
    assert handle.finished is not None
    finished = handle.finished.reason is FinishReason.STOP
    timings = handle.finished.timings
    return {
        "prompt": case["prompt"],
        "text": text,
        "finished": finished,
        "valid": finished and _is_valid(text, case["schema"]),
        "tokens": handle.finished.usage.completion_tokens,
        "decode_s": timings.total_s - timings.queue_s,
    }


def _is_valid(text: str, schema: Any) -> bool:
    try:
        # decimal numbers: as floats, 0.29 is no multiple of 0.01
        return bool(Draft202012Validator(schema).is_valid(json.loads(text, parse_float=Decimal)))
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
