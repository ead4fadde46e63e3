"""A text much longer than the context, read through the sliding window: what the model still understands at its end.

    python -m tools.eval.sliding MODEL [--text FILE ...] [--tokens 20000] [--context 1024] [--last 4000] [--every 16]

Three readings of the same ids (teacher forcing), compared by the perplexity of the last `--last` tokens:

    sliding        one pass through the ring, which keeps the first 64 tokens and the last `context - 64`
    without sinks  one pass through a ring that keeps the last `context` tokens and none of the first
    recomputed     for every `--every`-th token, the first 64 and the last `context - 64` tokens before it are read anew at
                   positions 0, 1, 2, ...

Then both rings are asked some questions, and so is a fresh conversation, in which the model also reads the answers of all
three: an answer that has lost its thread surprises it (its perplexity there) or repeats itself (few of its sequences of four
tokens are distinct).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_llm.cache.kv_cache import KVCache
from edge_llm.config import default_threads
from edge_llm.engine.assembly import cache_geometry
from edge_llm.engine.intake import Intake
from edge_llm.engine.request import Request
from edge_llm.engine.window import ContextWindow
from edge_llm.install.importer import resolve
from edge_llm.kernels.layout import TILE, KvType
from edge_llm.kernels.warmup import KernelLibrary, load_kernels
from edge_llm.messages import Message
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.session import Session
from edge_llm.model.step import Segment, Step
from edge_llm.sampling.decoders import SampledDecoder
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler

ROOT = Path(__file__).parents[2]
CHUNK = 256
_FOUR = 4
QUESTIONS = (
    "What is the capital of France?",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Write two sentences about the sea.",
    "Name three animals that live in Africa.",
    "What should I pack for a week in the mountains?",
)


def own_text() -> list[Path]:
    """What this project has written; the documentation changes, so the text whose perplexity counts comes last."""
    docs = sorted((ROOT / "docs").glob("*.md"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs, Path(__file__).with_name("english.txt")]


@dataclass(frozen=True)
class Model:
    """A model folder, opened as far as several caches can share it."""

    folder: Path
    manifest: ModelManifest
    kernels: KernelLibrary
    kv_type: KvType


class Reader:
    """One conversation with a model."""

    def __init__(self, model: Model, *, context: int, sinks: int) -> None:
        geometry = cache_geometry(model.manifest)
        self._cache = KVCache(geometry, slots=1, context=context, kv_type=model.kv_type, max_chunk=CHUNK, sinks=sinks)
        self._session = Session(
            model.folder,
            model.manifest,
            kernels=model.kernels,
            cache_descriptor=self._cache.descriptor_address,
            max_rows=CHUNK,
            threads=default_threads(),
        )
        self._slot = self._cache.acquire()

    def forget(self) -> None:
        """Begin a new conversation."""
        assert self._slot is not None
        self._cache.release(self._slot)
        self._slot = self._cache.acquire()

    def read(self, ids: Sequence[int], logit_rows: int = 0) -> np.ndarray:
        """Append tokens; float32 [logit_rows, vocab] of the last rows, at most CHUNK, valid until the next call."""
        assert self._slot is not None
        logits = np.empty((0, 0), np.float32)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            wanted = logit_rows if start + CHUNK >= len(ids) else 0
            segment = Segment(self._slot, self._cache.length(self._slot), chunk, wanted)
            logits = self._session.forward(Step((segment,)))
            self._cache.commit(self._slot, len(chunk))
        return logits

    def losses(self, ids: Sequence[int], last: int) -> np.ndarray:
        """float64 [last]: minus the log-probability of each of the last tokens of `ids`, given all before it."""
        begin = len(ids) - last
        self.read(ids[: begin - 1])
        found = []
        for first in range(begin, len(ids), CHUNK):
            targets = ids[first : first + CHUNK]
            found.append(_losses(self.read(ids[first - 1 : first - 1 + len(targets)], len(targets)), targets))
        return np.concatenate(found)

    def answer(self, prompt: Sequence[int], decoder: SampledDecoder, ends: Collection[int]) -> list[int]:
        """What the model says after `prompt`; then neither is remembered."""
        assert self._slot is not None
        length = self._cache.length(self._slot)
        said = decoder.select(self.read(prompt, 1)).accepted[0].token_id
        answer: list[int] = []
        while said not in ends and len(prompt) + len(answer) < CHUNK:  # what can be taken back is the size of a step
            answer.append(said)
            said = decoder.select(self.read([said], 1)).accepted[0].token_id
        if not self._cache.truncate(self._slot, length):
            raise SystemExit("the ring has lost what the answer was given after")
        return answer


def read_anew(reader: Reader, ids: Sequence[int], context: int) -> np.ndarray:
    """float32 [1, vocab]: what follows `ids` when only the first TILE and the last `context - TILE` are read."""
    reader.forget()
    return reader.read([*ids[:TILE], *ids[max(TILE, len(ids) - (context - TILE)) :]], 1)


def _losses(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    losses: np.ndarray = np.log(np.exp(values).sum(axis=1)) - values[np.arange(len(targets)), list(targets)]
    return losses


def distinct(ids: Sequence[int]) -> float:
    """Share of the sequences of four tokens that are distinct."""
    fours = [tuple(ids[start : start + _FOUR]) for start in range(len(ids) - _FOUR + 1)]
    return len(set(fours)) / len(fours)


def perplexity(losses: np.ndarray) -> float:
    return float(np.exp(losses.mean()))


def measure_reading(readers: dict[str, Reader], ids: Sequence[int], options: argparse.Namespace) -> dict[str, object]:
    """Perplexities of the last tokens; the rings have then read all but the very last one."""
    places = range(len(ids) - options.last, len(ids), options.every)
    anew = [_losses(read_anew(readers["fresh"], ids[:i], options.context), ids[i : i + 1]) for i in places]
    result: dict[str, object] = {"recomputed": {"at the places": perplexity(np.concatenate(anew))}}
    for name in ("sliding", "without sinks"):
        losses = readers[name].losses(ids, options.last)
        result[name] = {"at the places": perplexity(losses[:: options.every]), "of all": perplexity(losses)}
    return result


def answered(
    reader: Reader, prompts: Sequence[list[int]], sampler: Sampler, manifest: ModelManifest
) -> list[list[int]]:
    """The answer to each prompt, sampled as the model's recipe recommends."""
    params = SamplingParams(seed=1).with_defaults(manifest.sampling)
    return [reader.answer(prompt, SampledDecoder(sampler.sequence(params)), manifest.tokens.eos) for prompt in prompts]


def judged(judge: Reader, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> dict[str, float]:
    """The figures of all answers together."""
    surprise = []
    for prompt, answer in zip(prompts, answers, strict=True):
        judge.forget()
        judge.read(prompt[:-1])
        surprise.append(_losses(judge.read([prompt[-1], *answer[:-1]], len(answer)), answer))
    repeats = [distinct(answer) for answer in answers if len(answer) >= _FOUR]
    return {"perplexity": perplexity(np.concatenate(surprise)), "distinct": float(np.mean(repeats))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="name of a model, its folder, or a FILE.gguf")
    parser.add_argument("--text", type=Path, nargs="+", help="text files, read in this order; default: our own")
    for name, default in (("tokens", 20_000), ("context", 1024), ("last", 4000), ("every", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-dtype", choices=("int8", "f32"), default="int8")
    options = parser.parse_args()
    folder = resolve(options.model)
    model = Model(folder, ModelManifest.read(folder), load_kernels(), KvType[options.kv_dtype.upper()])
    sampler = Sampler(model.kernels, model.manifest.dimensions.vocab)
    window = ContextWindow(options.context)
    intake = Intake.open(folder, model.manifest, sampler=sampler, window=window, policy="slide")
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in options.text or own_text())
    ids = intake.tokenizer.encode_raw(text)[-options.tokens :]
    if len(ids) < options.tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, not {options.tokens}")
    sinks = {"sliding": TILE, "without sinks": 0, "fresh": TILE}
    readers = {name: Reader(model, context=options.context, sinks=kept) for name, kept in sinks.items()}
    reading = measure_reading(readers, ids, options)
    readers["fresh"].forget()
    prompts = [intake.prompt(Request.chat([Message.user(question)]))[0] for question in QUESTIONS]
    answers = {name: answered(reader, prompts, sampler, model.manifest) for name, reader in readers.items()}
    for name, given in answers.items():
        for question, answer in zip(QUESTIONS, given, strict=True):
            print(f"--- {name}: {question}\n{intake.tokenizer.decode(answer)}\n")
    figures = {name: judged(readers["fresh"], prompts, given) for name, given in answers.items()}
    settings = {name: getattr(options, name) for name in ("tokens", "context", "last", "every", "kv_dtype")}
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(json.dumps({**settings, "text_sha256": digest, "reading": reading, "answers": figures}))


if __name__ == "__main__":
    main()
