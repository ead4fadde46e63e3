"""Our side of `tools.bench.against_llama`: answers one measurement a line.

python -m tools.bench.ring_worker MODEL_FOLDER THREADS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from edge_llm.cache.kv_cache import KVCache
from edge_llm.engine.assembly import cache_geometry
from edge_llm.kernels.layout import KvType
from edge_llm.kernels.warmup import load_kernels
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.session import Session
from edge_llm.model.step import Segment, Step


def main() -> None:
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    manifest = ModelManifest.read(folder)
    cache = KVCache(cache_geometry(manifest), slots=1, context=8192, kv_type=KvType.INT8, max_chunk=512)
    slot = cache.acquire()
    assert slot is not None
    session = Session(
        folder,
        manifest,
        kernels=load_kernels(),
        cache_descriptor=cache.descriptor_address,
        max_rows=512,
        threads=threads,
    )
    tokens = np.random.default_rng(0).integers(20, 49000, 8192).tolist()

    def decode(ids: list[int]) -> None:
        session.forward(Step((Segment(slot, cache.length(slot), ids, 1),)))
        cache.commit(slot, len(ids))

    def move_to(target: int) -> None:
        if target < cache.length(slot):
            cache.truncate(slot, target)
        while (depth := cache.length(slot)) < target:
            decode(tokens[depth : depth + min(512, target - depth)])

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
        cache.truncate(slot, request["depth"])
        print(json.dumps(request["tokens"] / seconds), flush=True)
    session.close()


if __name__ == "__main__":
    main()
