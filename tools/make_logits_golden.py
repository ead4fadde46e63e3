"""Write tests/golden/tiny_logits.json and tiny_gemma_logits.json: llama.cpp's logits of the tiny models.

Needs llama-cpp-python, which nothing else here does; run it from the repository with a Python that has it:

    python -m tools.make_logits_golden

Weights and cache are float32, so that only the order of additions may differ, and llama.cpp's table of GELU, which holds
float16. The rows of Gemma's lie before, at and after the place where the local layers' window of 24 rows begins to leave
rows behind, and at every wrap of one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from tools.tiny_gemma import SMALLEST_VOCAB, write_tiny_gemma3
from tools.tiny_model import write_tiny_gguf

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
TOKENS = [1, 84, 104, 36, 68, 281, 290, 3, 258, 84, 7, 199, 330, 260, 12, 12, 12, 99]
ROWS = (0, 1, 8, 17)
GEMMA_TOKENS = [2, *((i * i * 37 + 11 * i) % (SMALLEST_VOCAB - 20) + 8 for i in range(75))]
GEMMA_ROWS = (0, 22, 23, 24, 25, 47, 48, 75)


def main() -> None:
    _write("tiny_logits.json", write_tiny_gguf, TOKENS, ROWS)
    _write("tiny_gemma_logits.json", write_tiny_gemma3, GEMMA_TOKENS, GEMMA_ROWS)


def _write(name: str, write_model: Callable[..., Path], tokens: Sequence[int], rows: Sequence[int]) -> None:
    from llama_cpp import Llama

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "tiny.gguf", matrix_type="F32", head_type="F32")
        llama = Llama(
            str(path), n_ctx=128, n_threads=1, logits_all=True, type_k=0, type_v=0, flash_attn=False, verbose=False
        )
    llama.eval(tokens)
    logits = [[round(float(x), 5) for x in llama.scores[row]] for row in rows]
    golden = {"made_with": {"llama-cpp-python": version("llama-cpp-python")}, "tokens": tokens, "rows": rows}
    (GOLDEN / name).write_text(json.dumps({**golden, "logits": logits}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
