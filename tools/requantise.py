"""Quantise a GGUF file again in the types of llama.cpp: real files of every type, for docs/quality.md.

Needs llama-cpp-python, which nothing else here does; run it from the repository with a Python that has it:

    python -m tools.requantise SmolLM2-135M-Instruct.Q4_1.gguf FOLDER
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_M", "Q6_K")


def main(source: Path, folder: Path) -> None:
    import llama_cpp

    llama_cpp.llama_backend_init()
    for name, kind, pure in (*((name, name, False) for name in TYPES), ("Q2_K-pure", "Q2_K", True)):
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        options.allow_requantize, options.pure = True, pure
        target = folder / f"{source.name.split('.')[0]}.{name}.gguf"
        if llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(options)):
            raise SystemExit(f"llama.cpp could not write {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
