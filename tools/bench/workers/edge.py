"""edge_llm's own worker, with the user's settings: the session for prefill and decode, the engine for all that users wait for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from edge_llm_cli.console import package_version

from edge_llm.config import EngineConfig, load_config
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.benchmark import Benchmark
from edge_llm.engine.engine import Engine
from edge_llm.kernels.warmup import load_kernels
from edge_llm.model.step import Segment, Step
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler
from tools.bench.workers import protocol


class EdgeWorker:
    def __init__(self, options: protocol.Options) -> None:
        self._folder = Path(options.model)
        self._config: EngineConfig = load_config(
            threads=options.threads,
            context=options.context,
            slots=options.sequences + 1,
            prefix_cache="off",
            speculation="off",
        )
        self._core = open_engine(self._folder, self._config)
        self._vocab = self._core.intake.manifest.dimensions.vocab
        self._ids = protocol.token_ids(options.context, self._vocab)
        self._benchmark = Benchmark(self._core, self._ids)
        self._engine: Engine | None = None

    def info(self) -> dict[str, Any]:
        manifest = self._core.intake.manifest
        return {
            "edge-llm": package_version("edge-llm"),
            "kv_type": self._core.cache.kv_type.name.lower(),
            "chunk": self._core.session.max_rows,
            "weights": ", ".join(f"{n} {kind}" for kind, n in manifest.source.tensor_types.items()),
        }

    def prefill(self, depth: int, tokens: int) -> float:
        return self._benchmark.prefill(depth, tokens)

    def decode(self, depth: int, tokens: int) -> float:
        return self._benchmark.decode(depth, tokens)

    def batch(self, sequences: int, depth: int, tokens: int) -> float:
        return self._benchmark.together(protocol.conversations(sequences, depth, self._vocab), tokens)

    def answer(self, prompt: str, max_tokens: int) -> int:
        if self._engine is None:
            self._engine = Engine.open(self._folder, self._config)
        handle = self._engine.complete(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))
        handle.text()
        assert handle.finished is not None
        return handle.finished.usage.prompt_tokens + handle.finished.usage.completion_tokens

    def sample(self, text: str, count: int, settings: dict[str, Any]) -> float:
        logits = self._logits_after(text)
        params = SamplingParams(seed=0, **({"temperature": 0.0} | settings))
        sampler = Sampler(load_kernels(), self._vocab).sequence(params, self._ids[:64])
        start = time.perf_counter()
        for i in range(count):
            sampler.observe(sampler.sample(logits, i).token_id)
        return time.perf_counter() - start

    def detokenise(self, text: str, count: int) -> float:
        tokenizer = self._core.intake.tokenizer
        ids = tokenizer.encode_raw(text)
        ids = (ids * (count // len(ids) + 1))[:count]
        detokenizer = tokenizer.detokenizer()
        start = time.perf_counter()
        for token_id in ids:
            detokenizer.feed(token_id)
        return time.perf_counter() - start

    def _logits_after(self, text: str) -> np.ndarray:
        ids = self._core.intake.tokenizer.encode_raw(text)
        slot = self._core.cache.acquire()
        assert slot is not None
        try:
            logits = self._core.session.forward(Step((Segment(slot, 0, ids, 1),)))
            return np.array(logits[0])
        finally:
            self._core.cache.release(slot)


if __name__ == "__main__":
    protocol.run(EdgeWorker)
