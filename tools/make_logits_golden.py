"""Write tests/golden/tiny_logits.json: llama.cpp's logits of the tiny model, a truth that is not ours.

Needs llama-cpp-python, which nothing else here does; run it from the repository with a Python that has it:

    python -m tools.make_logits_golden

Weights and cache are float32, so that only the order of additions may differ.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

from tools.tiny_model import write_tiny_gguf

TOKENS = [1, 84, 104, 36, 68, 281, 290, 3, 258, 84, 7, 199, 330, 260, 12, 12, 12, 99]
ROWS = (0, 1, 8, 17)


def main() -> None:
    from llama_cpp import Llama

    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_gguf(Path(folder) / "tiny.gguf", matrix_type="F32", head_type="F32")
        llama = Llama(
            str(path), n_ctx=64, n_threads=1, logits_all=True, type_k=0, type_v=0, flash_attn=False, verbose=False
        )
    llama.eval(TOKENS)
    logits = [[round(float(x), 5) for x in llama.scores[row]] for row in ROWS]
    golden = {"made_with": {"llama-cpp-python": version("llama-cpp-python")}, "tokens": TOKENS, "rows": ROWS}
    target = Path(__file__).parent.parent / "tests" / "golden" / "tiny_logits.json"
    target.write_text(json.dumps({**golden, "logits": logits}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
