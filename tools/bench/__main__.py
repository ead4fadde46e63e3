"""The benchmark suite: edge_llm beside its peers and this machine's limits, in one run.

    python -m tools.bench [MODEL.gguf] [--peers llama.cpp,genai,openvino] [--plot FILE.svg] [--quick] [--json]

docs/performance.md says what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from edge_llm.config import default_threads
from edge_llm.errors import EdgeLLMError
from tools.bench import plot, report, suite
from tools.bench.worker_process import ROOT

_BUSY = 0.5
"""load of other programs beside which figures mean little"""


def main() -> None:
    options = _options()
    settings = suite.Settings(
        gguf=options.gguf.resolve() if options.gguf else None,
        peers=[name for name in options.peers.split(",") if name],
        pythons={name: Path(path) for name, path in options.python},
        work=options.work.resolve(),
        threads=options.threads,
        rounds=options.rounds,
        timeout_s=options.timeout,
        quick=options.quick,
        sections=options.section,
    )
    load = os.getloadavg()[0]
    if load > _BUSY:
        _note(f"this machine is busy (load {load:.1f}): the figures will mean little")
    try:
        outcome = suite.run(settings, _note)
    except EdgeLLMError as error:
        _note(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
        sys.exit(2)
    if options.plot:
        title = f"{outcome.manifest.name}, {settings.threads} threads"
        options.plot.write_text(
            plot.decode_plot(report.decode_lines(outcome.results[settings.threads]), title), "utf-8"
        )
    if not options.json:
        print(report.text(outcome) + "\n")
    print(json.dumps(report.document(outcome)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("gguf", nargs="?", type=Path, help=f"the model; default: {suite.DEFAULT_MODEL}")
    add("--peers", default="llama.cpp", help="names of peers.toml, with commas between; default: llama.cpp")
    add("--python", action="append", default=[], type=_pair, metavar="PEER=PATH", help="the Python that runs a peer")
    add("--work", type=Path, default=ROOT / "build" / "bench", help="folder of the peers, their models and logs")
    add("--threads", type=_positive, default=default_threads(), help="default: one a physical core")
    add("--rounds", type=_positive, default=5, help="default: 5; what takes long has 3 at most")
    add("--timeout", type=float, default=600, metavar="SECONDS", help="of one measurement")
    add("--plot", type=Path, metavar="FILE.svg", help="write the plot of decode against context")
    sections = ("decode", "prefill", "batched decode", "first token", "a token's text")
    add(
        "--section", action="append", default=[], choices=sections, help="measure only this; may be given several times"
    )
    add("--quick", action="store_true", help="one round of a few cells, to see that all of it works")
    add("--json", action="store_true", help="print only the line of JSON")
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not PEER=PATH")
    return name, path


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
