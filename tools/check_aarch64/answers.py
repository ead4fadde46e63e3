"""Greedy answers of a model with their log-probabilities, as JSON: what two CPUs are compared by.

    python -m tools.check_aarch64.answers MODEL_FOLDER

The prompts are answered alone and together, with one thread and two, in small chunks and large: `same` says whether all of
it was equal bit for bit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from edge_llm import Engine, EngineConfig, Finished, SamplingParams, TextDelta

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little robot who",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
TOKENS = 12
_GREEDY = SamplingParams(
    max_tokens=TOKENS, temperature=0, repetition_penalty=1, top_logprobs=20, logprobs=True, ignore_eos=True
)


def answers(folder: Path, config: EngineConfig, *, together: bool) -> list[dict[str, Any]]:
    """Of each prompt the ids of the answer, and at each place the most probable (id, log-probability) pairs."""
    found = []
    with Engine.load(str(folder), config) as engine:
        handles = [engine.complete(prompt, _GREEDY) for prompt in PROMPTS] if together else []
        for i, prompt in enumerate(PROMPTS):
            places: list[list[tuple[int, float]]] = []
            ids: list[int] = []
            for event in handles[i] if together else engine.complete(prompt, _GREEDY):
                if isinstance(event, TextDelta):
                    places += [
                        [(token.token_id, token.logprob) for token in info.alternatives] for info in event.tokens
                    ]
                elif isinstance(event, Finished):
                    ids += event.token_ids
            found.append({"ids": ids, "places": places})
    return found


def main() -> None:
    """Print the answers of the model whose folder is the argument."""
    folder = Path(sys.argv[1])
    first = answers(folder, EngineConfig(context=512, threads=1), together=False)
    others = [
        answers(folder, EngineConfig(context=512, threads=2), together=True),
        answers(folder, EngineConfig(context=512, threads=2, max_chunk=16), together=False),
    ]
    json.dump({"answers": first, "same": all(other == first for other in others)}, sys.stdout)


if __name__ == "__main__":
    main()
