"""The soak at a tiny size, and that it would see what it is for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from random import Random

import pytest

from edge_llm.kernels.warmup import KernelLibrary
from tools.trust import soak, soak_traffic
from tools.trust.soak import Held, Seen, Server, Turns
from tools.trust.soak_server import LoopWatch


@pytest.fixture(scope="module")
def server(kernels: KernelLibrary) -> Iterator[Server]:
    with soak.tiny_model() as model, soak.serving(model, **soak.TINY) as made:
        yield made


@pytest.mark.parametrize("kind", soak_traffic.SHARES)
def test_every_kind_of_request_gets_the_reply_that_it_is_owed(server: Server, kind: soak_traffic.Kind) -> None:
    async def ask() -> None:
        async with soak_traffic.Client(server.port) as client:
            for seed in range(3):
                await kind(client, Random(seed))

    asyncio.run(ask())


def test_a_soak_looks_at_all_processes_after_each_slice(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with soak.same_answers(server):
        seen = soak.soak(server, Random(1), Turns(None), size=6, more=lambda seen: seen.requests < 60)
    assert seen.requests == len(seen.took) == 60
    assert len(seen.held) == 10
    assert all(held.resident > 2 * held.rows and held.files and held.threads > 2 for held in seen.held)
    assert seen.held[-1].temporary == 0
    assert seen.late is not None
    assert seen.late.looks > 0
    seen.tell()
    assert "60 requests" in capsys.readouterr().err


def test_a_reply_that_nobody_is_owed_is_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(client: soak_traffic.Client, random: Random) -> None:
        await client.ask("GET", "/v1/nothing")

    monkeypatch.setattr(soak_traffic, "SHARES", {ask: 1})
    with pytest.raises(ExceptionGroup) as error:
        soak.soak(server, Random(1), Turns(None), size=1, more=lambda seen: seen.requests < 1)
    assert error.group_contains(RuntimeError, match="404 instead of 200")


def test_a_soak_that_is_ended_early_tells_what_it_has_seen(server: Server) -> None:
    asked = []
    turns = Turns(None)

    async def ask(client: soak_traffic.Client, random: Random) -> None:
        asked.append(random)
        if len(asked) == 3:
            turns.stop()
        await client.ask("GET", "/health")

    seen = soak.soak(server, Random(1), turns, size=2, more=lambda seen: True, kind=ask)
    assert (seen.requests, len(seen.held)) == (4, 2)


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (Held(1 << 30, 0, 9, 9, 0), None),
        (Held((1 << 30) + (40 << 20), 20 << 20, 9, 9, 0), None),
        (Held((1 << 30) + (40 << 20), 0, 9, 9, 0), "40 MiB"),
        (Held(1 << 30, 0, 10, 9, 0), "10 files instead of 9"),
        (Held(1 << 30, 0, 9, 10, 0), "10 threads instead of 9"),
        (Held(1 << 30, 0, 9, 9, 1), "1 temporary instead of 0"),
    ],
)
def test_what_is_left_over_is_told(last: Held, what: str | None) -> None:
    seen = Seen(held=[Held(1 << 30, 0, 9, 9, 0)] * 9 + [last])
    if what is None:
        seen.check()
        return
    with pytest.raises(RuntimeError, match=what):
        seen.check()


def test_a_loop_that_was_held_up_is_seen() -> None:
    async def hold_up(seconds: float) -> None:
        await asyncio.sleep(0.02)
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            pass

    async def watched() -> None:
        watch = LoopWatch(asyncio.get_running_loop())
        watch.watch()
        await hold_up(0.3)
        await asyncio.sleep(0.02)
        late = watch.rest()
        assert late.max_ms > 290
        assert late.p50_ms > 100  # each look that could not be taken counts
        assert late.tasks == 1

    asyncio.run(watched())


def test_a_turn_begins_with_a_line_and_ends_with_its_command() -> None:
    turns = Turns(f"{sys.executable} -c \"print('go', flush=True); input()\"")
    turns.take()
    process = turns._process
    turns.take()
    assert process is not None
    assert turns._process is process, "the turn is not over"
    assert process.poll() is None
    turns.end()
    assert process.poll() is not None
