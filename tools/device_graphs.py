"""Write a model's graphs as an NPU's compiler takes them, every size fixed: for who has such a device, or another runtime.

    python -m tools.device_graphs MODEL FOLDER [--form qnn|coreml] [--context 1024] [--rows 1,32]

One file of weights, and a graph of some 300 KB for each number of rows (tokens of a run). Each graph is checked by the rules
of its form, and its numbers are compared with the source's on ONNX Runtime's CPU provider. docs/providers.md says what the
inputs and outputs are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.engine.assembly import cache_geometry
from edge_llm.errors import EdgeLLMError
from edge_llm.export.device_rules import RULES, pinned
from edge_llm.export.static_export import export_static
from edge_llm.install.importer import resolve
from edge_llm.kernels.layout import KvType
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.providers import fixed_sizes
from edge_llm.model.static_folder import GOLDEN_NAME, STATIC_GRAPH, StaticForm
from edge_llm.model.static_session import held_sizes


def main() -> None:
    options = _options()
    try:
        folder = resolve(options.model)
        options.folder.mkdir(parents=True)
        for path in write_device_graphs(
            folder, options.folder, StaticForm(options.form), options.context, options.rows
        ):
            print(path)
        print(f"KL to the float32 weights, after {GOLDEN_NAME}'s tokens: {divergence(folder, options.folder):.1e}")
    except (EdgeLLMError, OSError) as error:
        sys.exit(f"error: {error}")


def write_device_graphs(folder: Path, target: Path, form: StaticForm, context: int, rows: list[int]) -> list[Path]:
    """Write weights and graphs of the model in `folder` into `target`; gives the graphs."""
    import onnx

    manifest = ModelManifest.read(folder)
    export_static(folder, target, form)
    cache = KVCache(
        cache_geometry(manifest),
        slots=1,
        context=context,
        kv_type=KvType.F32,
        max_chunk=max(rows),
        storage=PlainRows,
    )
    held = held_sizes(manifest, cache)
    model: Any = onnx.load(str(target / STATIC_GRAPH), load_external_data=False)
    written = []
    for count in rows:
        path = target / f"rows-{count}.onnx"
        path.write_bytes(pinned(model, fixed_sizes(count, held)).SerializeToString(deterministic=True))
        onnx.checker.check_model(str(path))
        written.append(path)
    return written


def divergence(folder: Path, target: Path) -> float:
    """KL, in nats, of the golden logits in `target` to those of the model with float32 weights."""
    with tempfile.TemporaryDirectory() as scratch:
        export_static(folder, Path(scratch), StaticForm.F32)
        expected, found = (np.fromfile(at / GOLDEN_NAME, np.float32).astype(float) for at in (Path(scratch), target))
    theirs, ours = (logits - np.logaddexp.reduce(logits) for logits in (expected, found))
    return float((np.exp(theirs) * (theirs - ours)).sum())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.device_graphs", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", help="a name or a folder")
    add("folder", type=Path, help="to make and to write to")
    add("--form", choices=[form.value for form in RULES], default="qnn", help="default: %(default)s")
    add("--context", type=int, default=1024, help="tokens of a conversation; default: %(default)s")
    add("--rows", type=lambda text: [int(word) for word in text.split(",")], default=[1, 32], help="default: 1,32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
