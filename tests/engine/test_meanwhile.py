"""What is opened meanwhile is there when it is asked for, and closed by whoever does not get that far."""

from __future__ import annotations

import threading

import pytest

from edge_llm.engine.meanwhile import Meanwhile
from edge_llm.errors import SessionError


class Door:
    def __init__(self) -> None:
        self.thread, self.closed = threading.current_thread(), 0

    def close(self) -> None:
        self.closed += 1


def test_it_is_opened_by_another_thread() -> None:
    meanwhile = Meanwhile(Door)
    door = meanwhile.result()
    assert meanwhile.result() is door
    assert door.thread is not threading.current_thread()
    assert door.closed == 0


def test_the_caller_goes_on_before_it_is_open() -> None:
    may_open = threading.Event()

    def opening() -> Door:
        assert may_open.wait(60)
        return Door()

    meanwhile = Meanwhile(opening)
    may_open.set()
    meanwhile.close()
    assert meanwhile.result().closed == 1


def test_interrupts_do_not_close_what_is_still_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    may_open, interrupts = threading.Event(), [KeyboardInterrupt(), KeyboardInterrupt()]

    def opening() -> Door:
        assert may_open.wait(60)
        return Door()

    meanwhile = Meanwhile(opening)
    join = threading.Thread.join

    def interrupted(thread: threading.Thread) -> None:
        if interrupts:
            raise interrupts.pop()
        may_open.set()
        join(thread)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        meanwhile.close()
    assert meanwhile.result().closed == 1


def test_what_went_wrong_is_told_to_who_asks() -> None:
    def opening() -> Door:
        raise SessionError("no room")

    meanwhile = Meanwhile(opening)
    meanwhile.close()
    with pytest.raises(SessionError, match="no room"):
        meanwhile.result()
