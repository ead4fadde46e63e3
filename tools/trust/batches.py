"""F33: batches that are killed. A trial is a SIGKILL of `edge-llm batch` at a random moment, five in each batch.

    python -m tools.trust.batches [--size commit|nightly] [--seed N] [--model MODEL]

The input has 200 mixed lines, 20 of them bad. Half of the kills also tear the last line, as a power cut may. In the end each
input line has exactly one line, which says what a batch that nobody killed says; and what a killed process had written
stands where it stood. Without MODEL the engine is one of fakes, with the real command line, files and processes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.trust.figure import Figure

LINES, BAD, KILLS = 200, 20, 5
_ROOT = Path(__file__).parents[2]
_FAKE = [sys.executable, "-m", "tools.trust.batch_child", "0.002"]
_REAL = [sys.executable, "-c", "from edge_llm_cli.entry import run; run()", "batch"]
_VOLATILE = {"id", "created", "timings", "request_id", "prompt_tokens_details"}
_SYSTEMS = [f"You are {who}. Answer in one short sentence. " for who in ("a baker", "a sailor", "a judge")]


def trials(count: int, seed: int, model: str | None = None) -> int:
    """Batches until there were `count` kills; gives how many there were."""
    generator = random.Random(seed)
    kills = 0
    while kills < count:
        with tempfile.TemporaryDirectory() as folder:
            kills += _batch(Path(folder), generator, model)
    return kills


def _batch(folder: Path, generator: random.Random, model: str | None) -> int:
    source, target, whole = folder / "in.jsonl", folder / "out.jsonl", folder / "whole.jsonl"
    source.write_text("".join(line + "\n" for line in _lines(generator)), "utf-8")
    command = [*_REAL, "-m", model, str(source)] if model else [*_FAKE, "-m", "fake", str(source)]
    _ended(_start([*command, str(whole)]))
    reference = _results(whole)
    kept = b""
    for number in range(KILLS):
        process = _start([*command, str(target)])
        wanted = kept.count(b"\n") + generator.randrange(1, LINES // KILLS - 5)
        _wait_for_lines(process, target, wanted)
        time.sleep(generator.uniform(0, 0.01))
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        data = target.read_bytes()
        if number % 2:
            data = data[: len(data) - generator.randrange(len(data) - data[:-1].rfind(b"\n") - 1)]
            target.write_bytes(data)
        kept = data[: data.rfind(b"\n") + 1]
    _ended(_start([*command, str(target)]))
    assert target.read_bytes().startswith(kept), "what was written has changed"
    assert _results(target) == reference
    again = target.read_bytes()
    _ended(_start([*command, str(target)]))
    assert target.read_bytes() == again
    return KILLS


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(_ROOT / "apps"), str(_ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _ended(process: subprocess.Popen[bytes]) -> None:
    stdout, stderr = process.communicate()
    assert process.returncode == 1, (process.returncode, stdout, stderr)  # some lines are bad


def _wait_for_lines(process: subprocess.Popen[bytes], path: Path, wanted: int) -> None:
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= wanted:
            return
        time.sleep(0.005)


def _results(path: Path) -> list[Any]:
    """One settled result for each line of the input, in its order."""
    lines = sorted(map(json.loads, path.read_text("ascii").splitlines()), key=lambda line: str(line["id"]))
    assert len(lines) == LINES
    assert len({line["id"] for line in lines}) == LINES
    failed = [line for line in lines if line["response"] is None or line["response"]["status_code"] != 200]
    assert len(failed) == BAD, f"{len(failed)} lines failed"
    return [(line["id"], _settled(line)) for line in lines]


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _settled(part) for name, part in value.items() if name not in _VOLATILE}
    return [_settled(part) for part in value] if isinstance(value, list) else value


def _lines(generator: random.Random) -> list[str]:
    """The input; bad lines stand anywhere."""
    bad = set(generator.sample(range(1, LINES), BAD))
    return [_bad(generator, i) if i in bad else json.dumps(_good(generator, i)) for i in range(LINES)]


def _request(name: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def _good(generator: random.Random, i: int) -> dict[str, Any]:
    common = {"max_tokens": generator.randrange(1, 17), "seed": generator.randrange(10**6), "temperature": 0.8}
    kind = generator.randrange(7)
    if kind == 6:
        return _request(f"r{i}", "/v1/embeddings", {"input": [f"About {i}", "and more"]})
    if kind == 0:
        return _request(f"r{i}", "/v1/completions", {"prompt": f"Chapter {i}.", "logprobs": 2, **common})
    if kind == 1:
        return _request(f"r{i}", "/v1/completions", {"prompt": [[40, 50, i], [60]], "n": 2, "echo": True, **common})
    system = {"role": "system", "content": generator.choice(_SYSTEMS)}
    messages = [system, {"role": "user", "content": f"What about {generator.randrange(99)}?"}]
    variants: list[dict[str, Any]] = [{}, {"n": 2}, {"stop": ["\n"]}, {"logprobs": True, "top_logprobs": 1}]
    return _request(f"r{i}", "/v1/chat/completions", {"messages": messages, **common, **variants[kind - 2]})


def _bad(generator: random.Random, i: int) -> str:
    good = _good(generator, i)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    chat = "/v1/chat/completions"
    return generator.choice(
        [
            json.dumps(good)[:-3],
            "[" * 1000,
            json.dumps({**good, "custom_id": 7}),
            json.dumps({**good, "custom_id": "r0"}),
            json.dumps({**good, "method": "GET"}),
            json.dumps({**good, "url": "/v1/images"}),
            json.dumps(_request(f"r{i}", chat, {**body, "temperature": "hot"})),
            json.dumps(_request(f"r{i}", chat, {**body, "model": "another"})),
            json.dumps(_request(f"r{i}", chat, {**body, "messages": [{"role": "user", "content": "word " * 20_000}]})),
        ]
    )


def _main(arguments: list[str]) -> int:
    model = None
    if "--model" in arguments:
        place = arguments.index("--model")
        model = arguments[place + 1]
        del arguments[place : place + 2]
    what = "batches of 200 lines, 20 of them bad, that are killed five times"
    command = "python -m tools.trust.batches" + (f" --model {model}" if model else "")
    sizes = {"commit": KILLS, "nightly": 100 * KILLS}
    return Figure("F33", what, command, sizes, lambda count, seed: trials(count, seed, model)).main(arguments)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
