"""OpenVINO GenAI's worker, for a Python that has it. It reads GGUF files itself; what it makes of one is kept: it loads faster.

Its pipeline only answers whole requests, so every measurement reads its prompt anew and is taken from the pipeline's own
time stamps; choosing the token is part of each. Flags: `batched_tokens` (most tokens of a step), `cache_gb`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from tools.bench.workers import protocol


class OpenvinoWorker:
    def __init__(self, options: protocol.Options) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = options.flags["batched_tokens"]
        scheduler.cache_size = options.flags["cache_gb"]
        self._pipeline = openvino_genai.LLMPipeline(
            options.model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=options.threads
        )
        self._vocab = len(self._pipeline.get_tokenizer().get_vocab())

    def info(self) -> dict[str, Any]:
        return {"openvino-genai": openvino_genai.get_version(), "openvino": openvino.get_version()}

    def prefill(self, depth: int, tokens: int) -> float:
        if depth:
            raise ValueError("a prompt is always read from its beginning")
        metrics = self._generate(1, tokens, 1)
        return float(metrics.m_times_to_first_token[0]) / 1e6

    def decode(self, depth: int, tokens: int) -> float:
        return self.batch(1, depth, tokens)

    def batch(self, sequences: int, depth: int, tokens: int) -> float:
        times = self._generate(sequences, depth, tokens + 1).m_new_token_times
        return float(times[-1] - times[-1 - tokens]) / 1e3

    def answer(self, prompt: str, max_tokens: int) -> int:
        result = self._pipeline.generate(
            [prompt], do_sample=False, apply_chat_template=False, max_new_tokens=max_tokens
        )
        metrics = result.perf_metrics
        return int(metrics.get_num_input_tokens() + metrics.get_num_generated_tokens())

    def _generate(self, sequences: int, depth: int, tokens: int) -> Any:
        ids = np.array(protocol.conversations(sequences, depth, self._vocab), np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = self._pipeline.generate(inputs, do_sample=False, ignore_eos=True, max_new_tokens=tokens)
        return result.perf_metrics.raw_metrics


def prepare(source: str, target: str) -> None:
    """Let OpenVINO read the GGUF file, and keep the model that it makes of it beside its tokenizer."""
    folder = Path(target)
    folder.mkdir()
    copy = folder / "model.gguf"
    shutil.copyfile(source, copy)
    openvino_genai.LLMPipeline(copy, "CPU", enable_save_ov_model=True)
    copy.unlink()


if __name__ == "__main__":
    protocol.run(OpenvinoWorker, prepare)
