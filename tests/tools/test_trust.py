"""The figures of docs/trust.md that run with every commit, and that a failure would be seen."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_llm.cache import snapshot
from edge_llm.cache.tiled_rows import TiledRows
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.sampling.decoders import Selection
from edge_llm.sampling.speculation import SpeculativeDecoder
from edge_llm.toolbox import folder
from edge_llm.toolbox.approval import Decision
from edge_llm.toolbox.runner import ToolRunner
from tools.trust import bodies, clients, determinism, kernel_trials, machines, overload, prefixes, terminal, tools
from tools.trust.figure import Figure

ROOT = Path(__file__).parents[2]


def test_f21_kernels_are_those_of_plain_numpy() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tools.trust.kernels", "--size", "commit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("| F21 |")
    assert "| 0 failures | `python -m tools.trust.kernels --size commit --seed 1` |" in run.stdout


def test_f22_machines_agree_with_their_models(kernels: KernelLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert machines.FIGURE.main([]) == 0
    row = capsys.readouterr().out
    assert row.startswith("| F22 |")
    assert int(row.split("|")[4].replace(",", "")) >= machines.FIGURE.sizes["commit"]


def test_f26_terminals_get_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.FIGURE.main([]) == 0
    assert capsys.readouterr().out.startswith("| F26 |")


@pytest.mark.parametrize(
    "out",
    ["a\x1b[1000001mb", "\x1b]0;x\x07", "\x1b[6n", "\x1bc", "\x9b31m", "safe\rforged", "\u202ex", "\x1b]52;c;eA==\x07"],
)
def test_f26_sees_what_gets_through(out: str) -> None:
    assert terminal.harm(f"\x1b[?1049h\x1b[2;3H{out}\x1b[0m\r\n") is not None
    assert terminal.harm("\x1b[?1049h\x1b[2;3H1000001 ␛[1000001m\x1b[0m\r\n") is None


@pytest.mark.parametrize("number", prefixes.FIGURES)
def test_the_prefix_cache_on_disk_goes_through_all_of_it(number: str) -> None:
    """In a process of its own: F1 forks."""
    command = [sys.executable, "-m", "tools.trust.prefixes", number]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"| {number} |")


def test_batches_that_are_killed_answer_each_line_once() -> None:
    command = [sys.executable, "-m", "tools.trust.batches"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("| F33 |")


def test_f20_answers_are_the_same_in_all_circumstances() -> None:
    command = [sys.executable, "-m", "tools.trust.determinism"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("| F20 |")


def _ahead(self: SpeculativeDecoder, logits: np.ndarray, select=SpeculativeDecoder.select) -> Selection:
    """Draws with a later place's counter after each draft that was right."""
    selection = select(self, logits)
    self.index += len(selection.accepted) > 1
    return selection


@pytest.mark.parametrize(
    ("circumstance", "place", "name", "wrong"),
    [
        (determinism.among_seven, TiledRows, "copy", lambda *_: None),
        (determinism.speculated, SpeculativeDecoder, "select", _ahead),
        (determinism.found_on_disk, snapshot, "put", lambda *_: None),
    ],
    ids=["copies", "drafts", "blocks"],
)
def test_f20_would_see_a_difference(
    circumstance, place: object, name: str, wrong: object, kernels: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, wrong)
    monkeypatch.setattr(determinism, "CIRCUMSTANCES", (circumstance,))
    with pytest.raises(AssertionError, match=circumstance.__name__):
        determinism.trials(8, 1)


def test_f16_deaths_of_an_engine_are_told_and_survived() -> None:
    command = [sys.executable, "-m", "tools.trust.deaths"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("| F16 |")


def test_f11_runs_by_hand_what_the_server_s_tests_run(kernels: KernelLibrary) -> None:
    assert bodies.bodies(50, 2) == 50
    assert set(bodies.FIGURES) == {"F10", "F11"}


def test_f15_a_server_that_is_told_to_end_leaves_no_reply_cut() -> None:
    command = [sys.executable, "-m", "tools.trust.ends"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("| F15 |")


def test_f13_under_overload_every_request_is_answered_or_told_when_to_come_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert overload.FIGURE.main([]) == 0
    assert capsys.readouterr().out.startswith("| F13 |")


@pytest.mark.parametrize("wrong", ["200 without its end", "429 without a time", "200 of somebody else"])
def test_f13_would_see_a_request_that_is_lost(wrong: str) -> None:
    chunk = json.dumps({"choices": [{"delta": {"content": "a" * 24}}]})
    replies = {
        "200 without its end": f"HTTP/1.1 200 OK\r\nContent-Length: {len(chunk) + 8}\r\n\r\ndata: {chunk}\n\n",
        "429 without a time": 'HTTP/1.1 429 No\r\nContent-Length: 12\r\n\r\n{"error": 1}',
        "200 of somebody else": f"HTTP/1.1 200 OK\r\nContent-Length: {len(chunk) + 22}\r\n\r\ndata: {chunk}\n\ndata: [DONE]\n\n",
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(replies[wrong].encode())
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await overload._ask(server.sockets[0].getsockname()[1], overload.Told(), stream=True)

    with pytest.raises(RuntimeError, match="status"):
        asyncio.run(ask())


def test_a_failure_names_the_seed_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rng: np.random.Generator) -> int:
        raise ValueError("not what NumPy says")

    monkeypatch.setattr(kernel_trials, "_attention", lambda rng: 100)
    monkeypatch.setattr(kernel_trials, "_linear", wrong)
    with pytest.raises(AssertionError, match=r"wrong\(numpy\.random\.default_rng\(\[8, 3\]\)\)"):
        kernel_trials.trials(1000, 8)


def test_sizes_and_seeds_are_those_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def trials(count: int, seed: int) -> int:
        asked.append((count, seed))
        return count + 1

    figure = Figure("F0", "nothing", "python -m nothing", {"commit": 2, "nightly": 3000}, trials)
    assert figure.main([]) == 0
    assert figure.main(["--size", "nightly", "--seed", "9"]) == 0
    assert asked == [(2, 1), (3000, 9)]
    assert "| F0 | nothing | nightly | 3,001 | 0 failures | `python -m nothing --size nightly --seed 9` |" in (
        capsys.readouterr().out
    )


def test_f27_an_obedient_model_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.FIGURE.main([]) == 0
    assert capsys.readouterr().out.startswith("| F27 |")


@pytest.mark.parametrize("sabotage", ["approval", "path", "links"])
def test_f27_would_see_harm(sabotage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sabotage == "approval":
        monkeypatch.setattr(ToolRunner, "_decision", lambda *_: Decision.ONCE)
    elif sabotage == "path":
        monkeypatch.setattr(folder, "_names", lambda path: [part for part in path.split("/") if part])
    else:
        monkeypatch.setattr(folder.os, "O_NOFOLLOW", 0)
    with pytest.raises(AssertionError):
        tools.episodes(200, 1)


@pytest.mark.parametrize("number", clients.FIGURES)
def test_the_server_bears_all_kinds_of_clients(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert clients.FIGURES[number].main([]) == 0
    assert capsys.readouterr().out.startswith(f"| {number} |")
