"""Golden answers: what a model said of a few prompts when it was imported, and how far it is from that now.

A file beside the manifest holds, for each prompt, the most probable next tokens with their log-probabilities. A driver, a
runtime or a file that has changed since shows as a divergence long before anybody complains.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_llm.config import EngineConfig
from edge_llm.engine.client import EngineClient, ThreadClient
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError, EngineStoppedError, ModelFormatError
from edge_llm.install.staging import Progress
from edge_llm.messages import TextDelta
from edge_llm.model.manifest import GOLDEN_NAME
from edge_llm.sampling.params import MAX_TOP_LOGPROBS, SamplingParams

MOST_KL = 0.02
"""nats: several times what a KV cache of another type or another graph of the same weights costs (docs/quality.md)"""
PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "Zutaten: Mehl, Zucker,",
    "1, 2, 3, 5, 8, 13,",
    '{"name": "Ada", "born": 1815, "city":',
    "She opened the door, looked at the rain and said:",
    "Water boils at one hundred degrees. Ice melts at",
    # one that is longer than a tile of the cache
    "The harbour was quiet that morning. Two boats had come in before dawn, and their crews were asleep below. A cat sat "
    "on a pile of nets and watched the gulls, who watched the cat. The baker's boy came along the quay with a basket of "
    "warm bread, whistled, and put a loaf on the step of every house that had its shutters open. At the last house he "
    "stopped, for the door stood wide, and inside somebody was",
)
_VERSION = 1
_MAX_BYTES = 1 << 20

Distribution = Mapping[int, float]
"""natural log-probabilities of the most probable tokens"""


@dataclass(frozen=True, slots=True)
class Golden:
    """A distribution of the next token for each prompt, by its text."""

    distributions: Mapping[str, Distribution]

    def to_json(self) -> str:
        entries = [{"text": text, "logprobs": list(one.items())} for text, one in self.distributions.items()]
        return json.dumps({"version": _VERSION, "prompts": entries}, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Golden:
        """Raises `ModelFormatError`."""
        try:
            raw = json.loads(text)
            if raw["version"] != _VERSION:
                raise ValueError("another version")
            made = {str(one["text"]): _distribution(one["logprobs"]) for one in raw["prompts"]}
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            raise _unsound() from None
        if not 1 <= len(made) <= 64:
            raise _unsound()
        return cls(made)

    @classmethod
    def read(cls, folder: Path) -> Golden | None:
        """That of a model folder; None if it was imported without. Raises `ModelFormatError` for a damaged one."""
        path = folder / GOLDEN_NAME
        if not path.exists():
            return None
        try:
            if not path.is_file():  # a named pipe would wait for a writer
                raise _unsound()
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except OSError:
            raise _unsound() from None
        if len(data) > _MAX_BYTES:
            raise _unsound()
        return cls.from_json(data.decode("utf-8", "replace"))


def _unsound() -> ModelFormatError:
    return ModelFormatError(f"{GOLDEN_NAME} is damaged", hint="import the model again")


def _distribution(raw: Any) -> Distribution:
    made = {}
    for token_id, logprob in raw:
        if type(token_id) is not int or type(logprob) is not float or not math.isfinite(logprob) or logprob > 1e-3:
            raise ValueError("no log-probability")
        made[token_id] = logprob
    if not 1 <= len(made) <= MAX_TOP_LOGPROBS:
        raise ValueError("too few or too many tokens")
    return made


@dataclass(frozen=True, slots=True)
class Drift:
    """KL(then || now) in nats: the mean of the prompts, and the largest."""

    kl: float
    worst: float

    @property
    def ok(self) -> bool:
        return self.kl <= MOST_KL


def measure(client: EngineClient, prompts: tuple[str, ...] = PROMPTS) -> Golden:
    """What the engine says of the prompts now, when it has nothing else to do. Raises what requests raise."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS, ignore_eos=True
    )
    distributions = {}
    for text in prompts:
        handle = client.submit(Request.completion(text, params, cache=False, priority="batch"))
        tokens = [token for event in handle if isinstance(event, TextDelta) for token in event.tokens]
        if not tokens:
            raise EngineStoppedError("the engine ends its requests without an answer")
        distributions[text] = {other.token_id: other.logprob for other in tokens[0].alternatives}
    return Golden(distributions)


def drift(golden: Golden, client: EngineClient) -> Drift:
    """How far the engine is from what it said then. Raises what requests raise."""
    now = measure(client, tuple(golden.distributions))
    values = [divergence(then, now.distributions[text]) for text, then in golden.distributions.items()]
    return Drift(sum(values) / len(values), max(values))


def divergence(then: Distribution, now: Distribution) -> float:
    """KL(then || now) in nats over the tokens of `then`, with all others as one. A token that is not among those of `now`
    counts as the least probable of these, which is the most that it can be: the true value is larger."""
    least = min(now.values())
    ours = {token_id: now.get(token_id, least) for token_id in then}
    rest, our_rest = (max(1e-9, 1.0 - sum(map(math.exp, one.values()))) for one in (then, ours))
    total = sum(math.exp(logprob) * (logprob - ours[token_id]) for token_id, logprob in then.items())
    return max(0.0, total + rest * math.log(rest / our_rest))


def record(folder: Path, progress: Progress | None = None) -> None:
    """Write what the model in `folder` says now beside its manifest. A model that does not run here is left without."""
    with contextlib.suppress(EdgeLLMError), opened(folder, EngineConfig(), progress) as client:
        (folder / GOLDEN_NAME).write_text(measure(client).to_json(), "utf-8")


@contextlib.contextmanager
def opened(folder: Path, config: EngineConfig, progress: Progress | None = None) -> Iterator[EngineClient]:
    """The model of a folder as it would run with this config, for short questions that leave nothing behind."""
    from edge_llm.engine.assembly import open_engine  # whoever only compares does not load what an engine is made of

    config = config.with_options(slots=1, prefix_cache="off", private=True)
    client = ThreadClient(open_engine(folder, config, progress))
    try:
        yield client
    finally:
        client.close()
