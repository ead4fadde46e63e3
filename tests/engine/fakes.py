"""What engine tests run instead of a model: a session whose logits follow from the tokens, a sampler in NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.cache.block_file import BlockFormat
from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.prefix_store import PrefixStore
from edge_llm.cache.tiled_rows import LayerGeometry
from edge_llm.config import EngineConfig
from edge_llm.engine.core import EngineCore
from edge_llm.engine.energy import EnergyMeter
from edge_llm.engine.intake import Intake
from edge_llm.engine.window import ContextWindow
from edge_llm.errors import GenerationError, SessionError
from edge_llm.kernels.layout import CacheLayer, KvType
from edge_llm.messages import Event, TextDelta
from edge_llm.model.manifest import (
    GRAPH_NAME,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    FileSpec,
    LayerSpec,
    ModelDimensions,
    ModelManifest,
    SourceSpec,
    TokenSpec,
)
from edge_llm.model.step import Step
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampled
from edge_llm.text.chat_template import ChatTemplate
from edge_llm.text.tokenizer import Tokenizer
from edge_llm.text.tokenizer_parts import byte_alphabet

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARIS = "Paris — 東京 🗼, déjà vu."

NextToken = Callable[[list[int]], int | np.ndarray]
"""from the ids so far to the next id, or to a whole row of logits"""


@cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE: three control tokens, 256 bytes, a few words."""
    texts = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    vocab = {text: len(CONTROL) + i for i, text in enumerate(texts)}
    document = {
        "added_tokens": [{"id": i, "content": text, "special": True} for i, text in enumerate(CONTROL)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": list(MERGES)},
    }
    return Tokenizer.from_json(json.dumps(document))


def byte_ids(data: bytes | str) -> list[int]:
    """One id a byte, so that characters fall apart."""
    return [len(CONTROL) + byte for byte in (data.encode() if isinstance(data, str) else data)]


VOCAB = len(CONTROL) + 256 + len(MERGES)
START = CONTROL.index("<|im_start|>")
END = CONTROL.index("<|im_end|>")


def manifest(*, eos: tuple[int, ...] = (END, 0), **changes: Any) -> ModelManifest:
    spec = FileSpec(1, "0" * 64)
    values: dict[str, Any] = {
        "name": "fake",
        "architecture": "llama",
        "layout": "ring",
        "dimensions": ModelDimensions(
            vocab=VOCAB, hidden=32, intermediate=32, heads=4, kv_heads=2, head_dim=8, context=4096
        ),
        "layers": (LayerSpec(rope=None),),
        "rope": (),
        "tokens": TokenSpec(bos=None, eos=eos),
        "source": SourceSpec("fake.gguf", "0" * 64, 1, "gguf"),
        "files": dict.fromkeys((GRAPH_NAME, WEIGHTS_NAME, TOKENIZER_NAME, TEMPLATE_NAME), spec),
    }
    return ModelManifest(**{**values, **changes})


def hashed_logits(ids: list[int]) -> np.ndarray:
    """A row that depends on every token so far and on nothing else; control tokens are unlikely."""
    seed = np.array(ids, np.uint32)
    row = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed.tolist()))).standard_normal(VOCAB)
    row[: len(CONTROL)] -= 20.0
    return row.astype(np.float32)


def hashed_hidden(ids: list[int]) -> np.ndarray:
    """The hidden state of the last of these tokens."""
    return hashed_logits([*ids, VOCAB])[len(CONTROL) : len(CONTROL) + 32]


def says(answer: str | Sequence[int], *, end: int = END) -> NextToken:
    """A model that answers with this, then `end`: after one token, after START, or after the last line of a chat."""
    tokens = byte_ids(answer) if isinstance(answer, str) else list(answer)
    header = byte_ids("assistant\n")

    def following(ids: list[int]) -> int:
        start = len(ids) - ids[::-1].index(START) if START in ids else 1
        if ids[start : start + len(header)] == header:
            start += len(header)
        said = len(ids) - start
        return tokens[said] if said < len(tokens) else end

    return following


class FakeSession:
    """Checks each step as a real session would, and more; remembers what was written to which slot.

    A row of the cache holds its token's id, as the scale of its key: what is not lost yet is read from there.
    """

    def __init__(self, kv: KVCache, *, max_rows: int = 64, model: NextToken = hashed_logits) -> None:
        self.max_rows = max_rows
        self.model = model
        self.steps: list[Step] = []
        self.closed = False
        self.before_step: Callable[[Step], None] = lambda step: None
        self._kv = kv
        self._rows: dict[int, list[int]] = {}
        self._logits = np.empty((max_rows, VOCAB), np.float32)

    def forward(self, step: Step) -> np.ndarray:
        assert not self.closed
        self.steps.append(step)
        self.before_step(step)
        if not 0 < step.rows <= self.max_rows:
            raise SessionError(f"{step.rows} rows")
        slots = [segment.slot for segment in step.segments]
        assert len(set(slots)) == len(slots), "two segments of one slot"
        self._logits[:] = np.nan
        self._read: list[tuple[list[int], int]] = []
        row = 0
        for segment in step.segments:
            assert segment.position == self._kv.length(segment.slot), "a segment does not begin where its slot ends"
            assert segment.position + segment.rows <= self._kv.limit
            assert 0 <= segment.logit_rows <= segment.rows
            rows = self._rows[segment.slot] = self._history(segment.slot, segment.position)
            for position, token in enumerate(segment.token_ids, segment.position):
                self._place(segment.slot)[self._kv.layers[0].ring.physical_row(position)] = token
            self._written[segment.slot] = max(self._written[segment.slot], segment.position + segment.rows)
            rows.extend(segment.token_ids)
            self._read += [(rows, segment.position + i + 1) for i in range(segment.rows)]
            assert all(0 <= i < VOCAB for i in rows)
            for wanted in range(segment.rows - segment.logit_rows, segment.rows):
                self._logits[row] = self._row(rows[: segment.position + wanted + 1])
                row += 1
        return self._logits[: step.logit_rows]

    def hidden_states(self, rows: int) -> np.ndarray:
        """A vector a row, which depends on every token so far."""
        assert rows == len(self._read)
        return np.array([hashed_hidden(ids[:length]) for ids, length in self._read], np.float32)

    def _history(self, slot: int, length: int) -> list[int]:
        """The tokens of a slot's rows; those that its ring has lost are remembered."""
        ring, ids = self._kv.layers[0].ring, self._rows.get(slot, [])[:length]
        lost = ring.oldest_held(int(self._written[slot]))
        held = [*range(min(ring.sinks, length)), *range(lost, length)] if lost > ring.sinks else range(length)
        ids += [0] * (length - len(ids))
        for position in held:
            ids[position] = int(self._place(slot)[ring.physical_row(position)])
        return ids

    def _place(self, slot: int) -> np.ndarray:
        return self._kv.layers[0].arrays[CacheLayer.KEY_SCALES][slot, 0].reshape(-1)

    @property
    def _written(self) -> np.ndarray:
        return self._kv._written  # what kernels find by the cache's descriptor

    def _row(self, ids: list[int]) -> np.ndarray:
        following = self.model(list(ids))
        if isinstance(following, np.ndarray):
            return following
        row = np.zeros(VOCAB, np.float32)
        row[following] = 30.0
        return row

    def close(self) -> None:
        self.closed = True


class FakeSampler:
    """Temperature and log-probabilities only; draw k of a request depends on its seed and k alone."""

    def sequence(
        self, params: SamplingParams, prompt_ids: Sequence[int] = (), token_bytes: object = None
    ) -> FakeSequenceSampler:
        return FakeSequenceSampler(params)


class FakeSequenceSampler:
    drawn_seeds = 1000

    def __init__(self, params: SamplingParams) -> None:
        if params.seed is None:
            FakeSequenceSampler.drawn_seeds += 1
        self.seed = FakeSequenceSampler.drawn_seeds if params.seed is None else params.seed
        self.params = params
        self.observed: list[int] = []

    def sample(self, logits_row: np.ndarray, token_index: int, mask: np.ndarray | None = None) -> Sampled:
        if not np.isfinite(logits_row).all():
            raise GenerationError("the logits are not numbers")
        row = logits_row.astype(np.float64)
        scores = row
        if self.params.temperature:
            noise = np.random.Generator(np.random.Philox(key=self.seed, counter=token_index)).gumbel(size=row.size)
            scores = row / self.params.temperature + noise
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: scores.size]
            scores = np.where(allowed, scores, -np.inf)
        chosen = int(scores.argmax())
        if not self.params.logprobs:
            return Sampled(chosen)
        logprobs = row - row.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs, kind="stable")[: self.params.top_logprobs].tolist()
        return Sampled(chosen, float(logprobs[chosen]), tuple((i, float(logprobs[i])) for i in best))

    def observe(self, token_id: int) -> None:
        self.observed.append(token_id)


def make_core(
    model: NextToken = hashed_logits,
    *,
    context: int = 256,
    slots: int = 2,
    spare: int = 0,
    kv_budget: int | None = None,
    max_rows: int = 64,
    eos: tuple[int, ...] = (END, 0),
    clock: Callable[[], float] | None = None,
    energy: EnergyMeter | None = None,
    folder: Path | None = None,
    **options: Any,
) -> EngineCore:
    """An engine over fakes; `core.session` is the FakeSession. Its prefixes are kept in `folder`, and in `spare` slots.

    Without a `clock` all steps take the same time, so the pace allows as many prompt rows as `mixed_chunk`.
    """
    config = EngineConfig(
        context=context, slots=slots, max_chunk=max_rows, **{"mixed_chunk": 8, "mixed_pause_ms": 0, **options}
    )
    geometry = CacheGeometry((LayerGeometry(1, 8),))
    kv = KVCache(geometry, slots=slots + spare, context=context, kv_type=KvType.INT8, max_chunk=max_rows)
    session = FakeSession(kv, max_rows=max_rows, model=model)
    intake = Intake(
        manifest(eos=eos),
        tokenizer(),
        ChatTemplate(TEMPLATE),
        sampler=FakeSampler(),
        window=ContextWindow(context),
        policy=config.context_policy,
    )
    store = None
    if folder is not None:
        form = BlockFormat("fake", kv.snapshot_shapes(1))
        store = PrefixStore(folder, form, budget=config.prefix_cache_bytes)
    ticks = count(step=0.001)
    return EngineCore(
        session=session,
        cache=kv,
        intake=intake,
        config=config,
        store=store,
        kv_budget=kv_budget,
        energy=energy,
        clock=clock or (lambda: next(ticks)),
    )


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))
