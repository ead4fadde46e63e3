"""A text much longer than the context, read through the sliding window: what the model still understands at its end.

    python -m tools.eval.sliding MODEL [--text FILE ...] [--tokens 20000] [--context 1024] [--last 4000] [--every 16]

Three readings of the same ids (teacher forcing), compared by the perplexity of the last `--last` tokens:

    sliding        one pass through the ring, which keeps the first 64 tokens and the last `context - 64`
    without sinks  one pass through a ring that keeps the last `context` tokens and none of the first
    recomputed     for every `--every`-th token, the first 64 and the last `context - 64` tokens before it are read anew at
                   positions 0, 1, 2, ...

Then both rings go on by themselves. The model itself judges what they say, from an empty context with the end of the text.
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
        """What the model says after `last_token`, which was not read yet."""
        said = [last_token]
        while len(said) <= tokens:
            said.append(decoder.select(self.read(said[-1:], 1)).accepted[0].token_id)
        return said[1:]


def recomputed_losses(reader: Reader, ids: Sequence[int], places: Sequence[int], context: int) -> np.ndarray:
    """float64 [places]: the same for the tokens at `places`, each from a fresh reading of sinks and window alone."""
    found = []
    for place in places:
        reader.forget()
        window = ids[max(TILE, place - (context - TILE)) : place]
        found.append(_losses(reader.read([*ids[:TILE], *window], 1), ids[place : place + 1]))
    return np.concatenate(found)


def _losses(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    losses: np.ndarray = np.log(np.exp(values).sum(axis=1)) - values[np.arange(len(targets)), list(targets)]
    return losses


def perplexity(losses: np.ndarray) -> float:
    return float(np.exp(losses.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="name of a model, its folder, or a FILE.gguf")
    parser.add_argument("--text", type=Path, nargs="+", help="text files, read in this order; default: our own")
    for name, default in (("tokens", 20_000), ("context", 1024), ("last", 4000), ("every", 16), ("say", 160)):
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

    readers = {"sliding": Reader(model, context=options.context, sinks=TILE)}
    readers["without sinks"] = Reader(model, context=options.context, sinks=0)
    fresh = Reader(model, context=options.context, sinks=TILE)
    losses = {name: reader.losses(ids, options.last) for name, reader in readers.items()}
    places = range(len(ids) - options.last, len(ids), options.every)
    recomputed = recomputed_losses(fresh, ids, places, options.context)
    result: dict[str, object] = {
        "tokens": len(ids),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "context": options.context,
        "last": options.last,
        "every": options.every,
        "kv_dtype": options.kv_dtype,
        "recomputed": perplexity(recomputed),
    }
    for name, found in losses.items():
        result[name] = {
            "perplexity": perplexity(found),
            "at the recomputed places": perplexity(found[:: options.every]),
        }

    sampler = Sampler(model.kernels, model.manifest.dimensions.vocab)
    params = SamplingParams(seed=1, temperature=0.7, top_p=0.9).with_defaults({})
    for name, reader in readers.items():
        said = reader.continuation(ids[-1], SampledDecoder(sampler.sequence(params)), options.say)
        fresh.forget()
        fresh.read(ids[-CHUNK:-1])
        judged = _losses(fresh.read([ids[-1], *said[:-1]], len(said)), said)
        print(f"--- {name} (perplexity of what it said: {perplexity(judged):.1f}) ---\n{tokenizer.decode(said)}\n")
        result[f"{name}, said"] = perplexity(judged)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
