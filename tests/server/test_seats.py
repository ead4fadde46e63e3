"""Seats: nobody has all of them who is not alone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from edge_llm_server.api_error import ApiError
from edge_llm_server.keys import ApiKey
from edge_llm_server.seats import Seats

from tests.server.harness import Running, running
from tests.server.test_life import CHAT, Gate, until

KEYS = (ApiKey.of("ann", "a" * 32), ApiKey.of("bob", "b" * 32))


def fill(
    seats: Seats, owner: str, stack: contextlib.ExitStack, *, in_background: bool = False, answers: int = 1
) -> int:
    """How many requests of a key are let in beside those that are there."""
    for number in range(100):
        try:
            stack.enter_context(seats.taken(owner, in_background=in_background, answers=answers))
        except ApiError as error:
            return number if (error.status, error.code) == (429, "queue_full") else -1
    raise AssertionError("it has no end")


@pytest.mark.parametrize(("most", "of_one"), [(32, 24), (8, 6), (5, 4), (4, 3), (2, 1), (1, 1)])
def test_one_of_several_keys_leaves_a_quarter(most: int, of_one: int) -> None:
    seats = Seats(most, shared=True)
    with contextlib.ExitStack() as stack:
        assert fill(seats, "ann", stack) == of_one
        assert fill(seats, "bob", stack) == most - of_one
        assert not seats.empty
    assert seats.empty
    with contextlib.ExitStack() as stack:
        assert fill(seats, "bob", stack) == of_one, "all were given back"


def test_a_key_that_is_alone_has_all() -> None:
    seats = Seats(8, shared=False)
    with contextlib.ExitStack() as stack:
        assert fill(seats, "", stack, answers=8) == 8


def test_each_answer_of_a_request_counts_and_one_request_always_may() -> None:
    seats = Seats(8, shared=True)
    with contextlib.ExitStack() as stack:
        assert fill(seats, "ann", stack, answers=3) == 2
        assert fill(seats, "bob", stack, answers=50) == 1
    assert seats.empty


def test_what_nobody_waits_for_takes_no_seat_of_others() -> None:
    seats = Seats(4, shared=True)
    with contextlib.ExitStack() as stack:
        assert fill(seats, "ann", stack, in_background=True) == 3
        assert fill(seats, "ann", stack) == 3
        assert fill(seats, "bob", stack, in_background=True) == 1
        assert fill(seats, "bob", stack) == 1


def ask(server: Running, letter: str, tier: str, n: int = 1, **body: Any) -> socket.socket:
    """A stream that was asked for and is not read."""
    connection = socket.create_connection(("127.0.0.1", server.serving.port), timeout=30)
    request = httpx.Request(
        "POST",
        f"{server.url}/v1/chat/completions",
        json={**CHAT, "stream": True, "service_tier": tier, "n": n, **body},
        headers={"authorization": f"Bearer {letter * 32}"},
    )
    lines = [f"{name}: {value}" for name, value in request.headers.items()]
    connection.sendall("\r\n".join(["POST /v1/chat/completions HTTP/1.1", *lines, "", ""]).encode() + request.read())
    return connection


@pytest.mark.parametrize("tier", ["flex", "default", "priority"])
def test_a_flood_of_one_key_leaves_others_their_seats(tier: str) -> None:
    """8 seats: 2 slots and 6 that wait. Ann asks for 20 answers, of which 6 are taken."""
    gate = Gate(slots=2, max_queued_requests=6)
    floods: list[socket.socket] = []
    status: Callable[[str], list[int]] = lambda key: [  # noqa: E731
        entry["status"] for entry in server.log if entry.get("key") == key
    ]
    with running(gate, keys=KEYS, most_requests=8) as server:
        try:
            floods += [ask(server, "a", tier, n) for n in (1, 2, 3)]
            until(lambda: bool(server.cores) and len(server.core._scheduler) == 6)
            floods += [ask(server, "a", tier) for _ in range(14)]
            until(lambda: status("ann").count(429) == 14)
            floods += [ask(server, "b", "default"), ask(server, "b", "default")]
            until(lambda: len(server.core._scheduler) == 8)
            assert status("bob") == []
        finally:
            for flood in floods:
                flood.close()
            gate.open()
        until(lambda: len(server.core._scheduler) == 0)


@pytest.mark.parametrize("tier", ["default", "priority"])
@pytest.mark.parametrize("words", ["hello", "x" * 2000], ids=["answers", "prompts"])
def test_a_flood_of_one_key_keeps_nobody_waiting(words: str, tier: str) -> None:
    """Ann has all slots with long prompts, or endless answers, and as much waits: Bob has his answer within 20 steps."""
    gate = Gate(slots=4, max_queued_requests=12)
    connections: list[socket.socket] = []
    with running(gate, keys=KEYS, most_requests=16) as server:
        try:
            for _ in range(12):
                connections.append(ask(server, "a", tier, messages=[{"role": "user", "content": words}]))
            until(lambda: bool(server.cores) and len(server.core._scheduler) == 12)
            gate.let(40)
            until(lambda: gate.steps == 40)
            connections.append(ask(server, "b", tier, max_tokens=3))
            until(lambda: len(server.core._scheduler) == 13)
            (bob,) = (one for one in server.core._scheduler.sequences if one.owner == "bob")
            gate.let(20)
            until(lambda: bob.ended)
            assert gate.steps <= 60
            assert [one.owner for one in server.core._scheduler.sequences] == ["ann"] * 12
        finally:
            for connection in connections:
                connection.close()
            gate.open()
