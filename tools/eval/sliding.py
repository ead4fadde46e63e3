"""A text much longer than the context, read through the sliding window: what the model still understands at its end.

    python -m tools.eval.sliding MODEL [--text FILE ...] [--tokens 20000] [--context 1024] [--last 4000] [--every 16]

Three readings of the same ids (teacher forcing), compared by the perplexity of the last `--last` tokens:

    sliding        one pass through the ring, which keeps the first 64 tokens and the last `context - 64`
    without sinks  one pass through a ring that keeps the last `context` tokens and none of the first
    recomputed     for every `--every`-th token, the first 64 and the last `context - 64` tokens before it are read anew at
                   positions 0, 1, 2, ...

Then each goes on by itself, from several seeds, the third from its last reading. A text that has lost its thread repeats itself
(few of its sequences of four tokens are distinct) or surprises the model that reads it after the end of the text, in an
empty context (its perplexity there).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_llm.cache.kv_cache import KVCache
from edge_llm.config import default_threads
from edge_llm.engine.assembly import cache_geometry
from edge_llm.install.importer import resolve
from edge_llm.kernels.layout import TILE, KvType
from edge_llm.kernels.warmup import KernelLibrary, load_kernels
from edge_llm.model.manifest import TOKENIZER_NAME, ModelManifest
from edge_llm.model.session import Session
from edge_llm.model.step import Segment, Step
from edge_llm.sampling.decoders import SampledDecoder
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler
from edge_llm.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
CHUNK = 256
SPEECH = SamplingParams(temperature=0.8, top_p=0.95).with_defaults({})


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

    def continuation(self, last_token: int, decoder: SampledDecoder, tokens: int) -> list[int]:
        """What the model says after `last_token`, which was not read yet; nothing of it is remembered."""
        assert self._slot is not None
        length = self._cache.length(self._slot)
        said = [last_token]
        while len(said) <= tokens:
            said.append(decoder.select(self.read(said[-1:], 1)).accepted[0].token_id)
        if not self._cache.truncate(self._slot, length):
            raise SystemExit(f"{tokens} tokens cannot be taken back; say fewer than {CHUNK}")
        return said[1:]


def read_anew(reader: Reader, ids: Sequence[int], context: int, logit_rows: int) -> np.ndarray:
    """As `Reader.read` of `ids`, but of the first TILE and the last `context - TILE` alone, at positions 0, 1, 2, ..."""
    reader.forget()
    return reader.read([*ids[:TILE], *ids[max(TILE, len(ids) - (context - TILE)) :]], logit_rows)


def _losses(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    losses: np.ndarray = np.log(np.exp(values).sum(axis=1)) - values[np.arange(len(targets)), list(targets)]
    return losses


def judged(reader: Reader, before: Sequence[int], said: Sequence[int]) -> np.ndarray:
    """float64 [said]: minus the log-probability of each token when it is read after `before` alone."""
    reader.forget()
    reader.read(before[:-1])
    return _losses(reader.read([before[-1], *said[:-1]], len(said)), said)


def distinct(ids: Sequence[int]) -> float:
    """Share of the sequences of four tokens that are distinct."""
    fours = list(zip(*(ids[start:] for start in range(4)), strict=False))
    return len(set(fours)) / len(fours)


def perplexity(losses: np.ndarray) -> float:
    return float(np.exp(losses.mean()))


def measure_reading(readers: dict[str, Reader], ids: Sequence[int], options: argparse.Namespace) -> dict[str, object]:
    """Perplexities of the last tokens; afterwards all readers have read all but the last one."""
    places = range(len(ids) - options.last, len(ids), options.every)
    anew = [_losses(read_anew(readers["recomputed"], ids[:i], options.context, 1), ids[i : i + 1]) for i in places]
    read_anew(readers["recomputed"], ids[:-1], options.context, 0)
    result: dict[str, object] = {"recomputed": {"at the places": perplexity(np.concatenate(anew))}}
    for name in ("sliding", "without sinks"):
        losses = readers[name].losses(ids, options.last)
        result[name] = {"at the places": perplexity(losses[:: options.every]), "of all": perplexity(losses)}
    return result


def measure_speech(
    readers: dict[str, Reader], ids: Sequence[int], sampler: Sampler, options: argparse.Namespace
) -> dict[str, tuple[list[int], dict[str, float]]]:
    """For each reader its first continuation, and the figures of all."""
    texts = {}
    for name, reader in readers.items():
        decoders = [SampledDecoder(sampler.sequence(SPEECH.with_options(seed=seed))) for seed in range(options.seeds)]
        texts[name] = [reader.continuation(ids[-1], decoder, options.say) for decoder in decoders]
    judge = readers["recomputed"]
    return {
        name: (
            said[0],
            {
                "perplexity": perplexity(np.concatenate([judged(judge, ids[-CHUNK:], one) for one in said])),
                "distinct": float(np.mean([distinct(one) for one in said])),
            },
        )
        for name, said in texts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="name of a model, its folder, or a FILE.gguf")
    parser.add_argument("--text", type=Path, nargs="+", help="text files, read in this order; default: our own")
    for name, default in (
        ("tokens", 20_000),
        ("context", 1024),
        ("last", 4000),
        ("every", 16),
        ("say", 160),
        ("seeds", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-dtype", choices=("int8", "f32"), default="int8")
    options = parser.parse_args()
    folder = resolve(options.model)
    model = Model(folder, ModelManifest.read(folder), load_kernels(), KvType[options.kv_dtype.upper()])
    tokenizer = Tokenizer.from_file(folder / TOKENIZER_NAME)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in options.text or own_text())
    ids = tokenizer.encode_raw(text)[-options.tokens :]
    if len(ids) < options.tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, not {options.tokens}")
    sinks = {"sliding": TILE, "without sinks": 0, "recomputed": TILE}
    readers = {name: Reader(model, context=options.context, sinks=kept) for name, kept in sinks.items()}
    reading = measure_reading(readers, ids, options)
    speech = measure_speech(readers, ids, Sampler(model.kernels, model.manifest.dimensions.vocab), options)
    for name, (said, _) in speech.items():
        print(f"--- {name} ---\n{tokenizer.decode(said)}\n")
    settings = {
        name: getattr(options, name) for name in ("tokens", "context", "last", "every", "kv_dtype", "say", "seeds")
    }
    digest = hashlib.sha256(text.encode()).hexdigest()
    spoken = {name: figures for name, (_, figures) in speech.items()}
    print(json.dumps({**settings, "text_sha256": digest, "reading": reading, "speech": spoken}))


if __name__ == "__main__":
    main()
