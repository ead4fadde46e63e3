"""Channel: what is sent arrives in order, whatever happens to the other side."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from edge_llm.engine.channel import Channel
from edge_llm.engine.codec import WireError
from edge_llm.engine.protocol import Cancel, Happened
from edge_llm.engine.wire import FrameReader, frame
from edge_llm.messages import TextDelta


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare other end of its connection."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()
    assert not channel._writer.is_alive()


def everything(connection: socket.socket) -> bytes:
    data = b""
    while more := connection.recv(1 << 16):
        data += more
    return data


def test_values_and_ready_frames_arrive_in_order(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    sent = [Cancel(i) for i in range(1000)]
    for i, value in enumerate(sent):
        channel.send(frame([value]) if i % 3 == 0 else value)
    finishing = threading.Thread(target=channel.finish)
    finishing.start()
    assert FrameReader().feed(everything(other)) == sent
    finishing.join()


def test_what_comes_up_while_it_writes_goes_out_together(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    first = Happened(0, TextDelta("x" * (1 << 22)))
    channel.send(first)  # more than the connection takes before somebody reads
    other.recv(1)
    for i in range(200):
        channel.send(Cancel(i))
    finishing = threading.Thread(target=channel.finish)
    finishing.start()
    data = frame([first])[:1] + everything(other)
    finishing.join()
    rest = data[len(frame([first])) :]
    assert rest == frame([Cancel(i) for i in range(200)])


def test_who_sends_at_once_waits_for_nobody_and_keeps_the_order(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    channel.send_now([Cancel(0), Cancel(1)])
    expected = [Cancel(0), Cancel(1)]
    assert other.recv(1 << 16) == frame(expected), "it is there already, in one frame"
    large = Happened(0, TextDelta("x" * (1 << 22)))
    sent: list[object] = [large]  # far more than the connection takes: most of it stays for the other thread
    channel.send_now([large])
    for i in range(1000):
        sent.append(Cancel(i))
        if i % 3:
            channel.send_now([Cancel(i)])
        else:
            channel.send(Cancel(i))
    channel.send_now([Cancel(7)] * 1000)
    sent += [Cancel(7)] * 1000
    finishing = threading.Thread(target=channel.finish)
    finishing.start()
    assert FrameReader().feed(everything(other)) == sent
    finishing.join()


def test_who_sends_at_once_hears_what_cannot_be_written(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    with pytest.raises(WireError):
        channel.send_now([object()])
    channel.send_now([Cancel(1)])
    assert other.recv(1 << 16) == frame([Cancel(1)])
    other.close()
    channel.send_now([Cancel(2)])
    channel.send_now([Cancel(3)])  # nobody reads: lost, as with `send`
    assert channel.receive() == []


def test_a_reader_that_has_gone_stops_nobody(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.close()
    for i in range(10_000):
        channel.send(Cancel(i))
    channel.finish()
    assert channel.receive() == []


def test_closing_wakes_a_writer_that_nobody_reads_from(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    channel.send(Happened(0, TextDelta("x" * (1 << 23))))
    other.recv(1)
    channel.close()
    assert not channel._writer.is_alive()


def test_both_directions_are_one_another_s_affair(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(frame([Cancel(1), Cancel(2)]) + frame([]) + frame([Cancel(3)])[:-1])
    assert channel.receive() == [Cancel(1), Cancel(2)]
    other.sendall(frame([Cancel(3)])[-1:])
    assert channel.receive() == [Cancel(3)]
    other.shutdown(socket.SHUT_WR)
    assert channel.receive() == []


def test_what_is_no_value_is_refused(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(WireError):
        channel.receive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_value_that_cannot_be_written_ends_the_connection(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    channel.send(object())
    assert everything(other) == b""
    assert channel.receive() == []


def test_it_remembers_that_much_has_come(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(frame([Cancel(1)]))
    assert channel.receive() == [Cancel(1)]
    assert not channel.received_much()
    big = Happened(0, TextDelta("x" * (1 << 22)))
    sending = threading.Thread(target=other.sendall, args=(frame([big]),))
    sending.start()
    assert channel.receive() == [big]
    sending.join()
    assert channel.received_much()
    assert not channel.received_much()
