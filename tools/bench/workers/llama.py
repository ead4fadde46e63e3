"""llama.cpp's worker, for a Python that has llama-cpp-python: its C API, without the Python layer above it.

Flags: `ubatch` (most rows of a step), `kv_unified` (one cache for all conversations of a batch).
"""

from __future__ import annotations

import codecs
import ctypes
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp

from tools.bench.workers import protocol

_BATCH_CONTEXT = 512
"""tokens that each conversation of a batch may have"""
_PIECE_BYTES = 256


class LlamaWorker:
    def __init__(self, options: protocol.Options) -> None:
        llama_cpp.llama_backend_init()
        self._options = options
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options.model.encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._context = self._open_context(options.context, 1)
        self._tokens = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._ids = protocol.token_ids(options.context, self._tokens)
        self._depth = 0
        self._batch_context: Any = None

    def info(self) -> dict[str, Any]:
        description = ctypes.create_string_buffer(_PIECE_BYTES)
        llama_cpp.llama_model_desc(self._model, description, _PIECE_BYTES)
        return {
            "llama-cpp-python": llama_cpp.__version__,
            "model": description.value.decode(),
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def prefill(self, depth: int, tokens: int) -> float:
        self._move_to(depth)
        start = time.perf_counter()
        self._read(depth + tokens)
        return time.perf_counter() - start

    def decode(self, depth: int, tokens: int) -> float:
        self._move_to(depth)
        start = time.perf_counter()
        for position in range(depth, depth + tokens):
            self._read(position + 1)
        return time.perf_counter() - start

    def batch(self, sequences: int, depth: int, tokens: int) -> float:
        """Steps of several conversations with greedy sampling, as a server would do it."""
        if self._batch_context is None:
            self._batch_context = self._open_context(_BATCH_CONTEXT * self._options.sequences, self._options.sequences)
        context, sampler = self._batch_context, self._sampler({})
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(max(sequences, depth), 0, 1)
        try:
            for sequence, ids in enumerate(protocol.conversations(sequences, depth, self._tokens)):
                self._run(context, _filled(batch, ids, range(depth), [sequence] * depth, [False] * depth))
            ids = self._ids[:sequences]
            start = time.perf_counter()
            for position in range(depth, depth + tokens):
                positions, numbers = [position] * sequences, range(sequences)
                self._run(context, _filled(batch, ids, positions, numbers, [True] * sequences))
                ids = [llama_cpp.llama_sampler_sample(sampler, context, i) for i in numbers]
            return time.perf_counter() - start
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_sampler_free(sampler)

    def answer(self, prompt: str, max_tokens: int) -> int:
        ids = self._tokenise(prompt)
        self._compute(ids)
        sampler, decoder, answered = self._sampler({}), _decoder(), 0
        try:
            while True:
                token = llama_cpp.llama_sampler_sample(sampler, self._context, -1)
                decoder.decode(self._piece(token))
                answered += 1
                if answered == max_tokens or llama_cpp.llama_vocab_is_eog(self._vocab, token):
                    return len(ids) + answered
                self._append([token])
        finally:
            llama_cpp.llama_sampler_free(sampler)

    def sample(self, text: str, count: int, settings: dict[str, float]) -> float:
        self._compute(self._tokenise(text))
        sampler = self._sampler(settings)
        start = time.perf_counter()
        for _ in range(count):
            llama_cpp.llama_sampler_sample(sampler, self._context, -1)
        seconds = time.perf_counter() - start
        llama_cpp.llama_sampler_free(sampler)
        return seconds

    def detokenise(self, text: str, count: int) -> float:
        ids = self._tokenise(text)
        ids = (ids * (count // len(ids) + 1))[:count]
        decoder = _decoder()
        start = time.perf_counter()
        for token in ids:
            decoder.decode(self._piece(token))
        return time.perf_counter() - start

    def _open_context(self, size: int, sequences: int) -> Any:
        flags = self._options.flags
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = size
        parameters.n_batch = parameters.n_ubatch = flags["ubatch"]
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = self._options.threads
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.kv_unified = flags["kv_unified"]
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp has no room for a context of {size} tokens")
        return context

    def _compute(self, ids: Sequence[int]) -> None:
        """Make `ids` all that the context holds."""
        self._move_to(0)
        for first in range(0, len(ids), self._options.flags["ubatch"]):
            self._append(ids[first : first + self._options.flags["ubatch"]])

    def _move_to(self, depth: int) -> None:
        """Make the first `depth` tokens of the measurements all that the context holds."""
        self._depth = min(self._depth, depth)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, self._depth, -1)
        self._read(depth)

    def _read(self, end: int) -> None:
        """Compute the tokens up to `end`."""
        while self._depth < end:
            rows = min(self._options.flags["ubatch"], end - self._depth)
            self._append(self._ids[self._depth : self._depth + rows])
            self._depth += rows

    def _append(self, ids: Sequence[int]) -> None:
        """Compute tokens that follow those of the context, and the logits of the last."""
        array = (llama_cpp.llama_token * len(ids))(*ids)
        self._run(self._context, llama_cpp.llama_batch_get_one(array, len(ids)))

    def _run(self, context: Any, batch: Any) -> None:
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        llama_cpp.llama_synchronize(context)

    def _sampler(self, settings: dict[str, float]) -> Any:
        """llama.cpp's usual chain, or the greedy one."""
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if settings:
            parts = [
                llama_cpp.llama_sampler_init_penalties(
                    llama_cpp.llama_vocab_n_tokens(self._vocab), 64, settings["repetition_penalty"], 0.0, 0.0
                ),
                llama_cpp.llama_sampler_init_top_k(int(settings["top_k"])),
                llama_cpp.llama_sampler_init_top_p(settings["top_p"], 1),
                llama_cpp.llama_sampler_init_min_p(settings["min_p"], 1),
                llama_cpp.llama_sampler_init_temp(settings["temperature"]),
                llama_cpp.llama_sampler_init_dist(0),
            ]
        else:
            parts = [llama_cpp.llama_sampler_init_greedy()]
        for part in parts:
            llama_cpp.llama_sampler_chain_add(chain, part)
        return chain

    def _tokenise(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), True, False)
        if count < 1:
            raise RuntimeError("llama.cpp cannot tokenise the text")
        return list(buffer[:count])

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, _PIECE_BYTES, 0, False)
        return buffer.raw[: max(0, size)]


def _filled(
    batch: Any, ids: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: list[bool]
) -> Any:
    batch.n_tokens = len(ids)
    for i, (token, position, sequence) in enumerate(zip(ids, positions, sequences, strict=True)):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted[i]
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    return batch


def _decoder() -> Any:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def prepare(source: str, target: str) -> None:
    """Requantise the file to Q4_0 with llama.cpp's own quantiser."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    parameters.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp cannot quantise {source}")


if __name__ == "__main__":
    protocol.run(LlamaWorker, prepare)
