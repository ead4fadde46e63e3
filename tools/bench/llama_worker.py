"""llama.cpp's side of `tools.bench.against_llama`: answers one measurement a line. Runs in a Python that has llama-cpp-python.

python llama_worker.py MODEL.gguf THREADS
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp
import numpy as np


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    llama = llama_cpp.Llama(
        path,
        n_ctx=8192,
        n_batch=512,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )
    context = llama._ctx.ctx
    memory = llama_cpp.llama_get_memory(context)
    tokens = np.random.default_rng(0).integers(20, 49000, 8192)
    depth = 0

    def decode(ids: np.ndarray) -> None:
        array = (llama_cpp.llama_token * len(ids))(*ids.tolist())
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(context)

    def move_to(target: int) -> None:
        nonlocal depth
        if target < depth:
            llama_cpp.llama_memory_seq_rm(memory, 0, target, -1)
            depth = target
        while depth < target:
            count = min(512, target - depth)
            decode(tokens[depth : depth + count])
            depth += count

    for line in sys.stdin:
        request = json.loads(line)
        move_to(request["depth"])
        start = time.perf_counter()
        if request["kind"] == "prefill":
            for first in range(0, request["tokens"], 512):
                decode(tokens[first : min(first + 512, request["tokens"])])
        else:
            for i in range(request["tokens"]):
                decode(tokens[i : i + 1])
        seconds = time.perf_counter() - start
        llama_cpp.llama_memory_seq_rm(memory, 0, request["depth"], -1)
        print(json.dumps(request["tokens"] / seconds), flush=True)


if __name__ == "__main__":
    main()
