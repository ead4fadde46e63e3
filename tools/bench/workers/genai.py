"""onnxruntime-genai's worker, for a Python that has it. Its model is made from the GGUF file's weights by genai's own builder.

Every decode step ends in genai's greedy choice of the token: its API has no step without one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from tools.bench.workers import protocol


class GenaiWorker:
    def __init__(self, options: protocol.Options) -> None:
        config = og.Config(options.model)
        session = {"intra_op_num_threads": options.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = og.Model(config)
        self._tokenizer = og.Tokenizer(self._model)
        self._context = options.context
        document = json.loads((Path(options.model) / "genai_config.json").read_text("utf-8"))
        self._vocab = document["model"]["vocab_size"]
        self._ids = protocol.token_ids(options.context, self._vocab)
        self._generator: Any = None

    def info(self) -> dict[str, Any]:
        return {"onnxruntime-genai": og.__version__}

    def prefill(self, depth: int, tokens: int) -> float:
        self._move_to(depth)
        start = time.perf_counter()
        self._read(depth, depth + tokens)
        return time.perf_counter() - start

    def decode(self, depth: int, tokens: int) -> float:
        self._move_to(depth)
        return _timed_tokens(self._generator, self._ids[depth], tokens)

    def batch(self, sequences: int, depth: int, tokens: int) -> float:
        generator = self._new_generator(depth + tokens + 2, sequences)
        generator.append_tokens(np.array(protocol.conversations(sequences, depth, self._vocab), np.int32))
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        return time.perf_counter() - start

    def answer(self, prompt: str, max_tokens: int) -> int:
        ids = self._tokenizer.encode(prompt)
        generator = self._new_generator(self._context, 1, min_length=0)
        generator.append_tokens(ids)
        stream, answered = self._tokenizer.create_stream(), 0
        while answered < max_tokens and not generator.is_done():
            generator.generate_next_token()
            stream.decode(generator.get_next_tokens()[0])
            answered += 1
        return len(ids) + answered

    def detokenise(self, text: str, count: int) -> float:
        ids = self._tokenizer.encode(text).tolist()
        ids = (ids * (count // len(ids) + 1))[:count]
        stream = self._tokenizer.create_stream()
        start = time.perf_counter()
        for token in ids:
            stream.decode(token)
        return time.perf_counter() - start

    def _new_generator(self, size: int, sequences: int, min_length: int | None = None) -> Any:
        """One that never ends by itself, unless `min_length` says when it may."""
        parameters = og.GeneratorParams(self._model)
        parameters.set_search_options(
            do_sample=False,
            max_length=size,
            min_length=size if min_length is None else min_length,
            batch_size=sequences,
        )
        return og.Generator(self._model, parameters)

    def _move_to(self, depth: int) -> None:
        """Make the first `depth` tokens all that the generator holds."""
        if self._generator is None:
            self._generator = self._new_generator(self._context, 1)
        length = min(depth, self._generator.token_count())
        self._generator.rewind_to(length)
        self._read(length, depth)

    def _read(self, start: int, end: int) -> None:
        if end > start:
            self._generator.append_tokens(np.array(self._ids[start:end], np.int32))


def _timed_tokens(generator: Any, token: int, tokens: int) -> float:
    generator.append_tokens(np.array([token], np.int32))
    generator.generate_next_token()  # only chooses: the step was made by append_tokens
    start = time.perf_counter()
    for _ in range(tokens):
        generator.generate_next_token()
    return time.perf_counter() - start


def prepare(source: str, target: str) -> None:
    """Dequantise the GGUF file, then let genai's builder make its default int4 model. Needs torch and transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, folder = Path(source).name, str(Path(source).parent)
    with tempfile.TemporaryDirectory(dir=Path(target).parent) as work:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        model.hf_quantizer = None  # its weights are plain float32 by now, which it would refuse to save as "quantised"
        del model.config.quantization_config
        model.save_pretrained(work)
        AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(work)
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", work, "-o", target]
        options = ["-p", "int4", "-e", "cpu", "-c", f"{work}/cache", "--extra_options", "hf_token=false"]
        subprocess.run([*builder, *options], check=True)


if __name__ == "__main__":
    protocol.run(GenaiWorker, prepare)
