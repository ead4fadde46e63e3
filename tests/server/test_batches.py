"""Files and batches, by OpenAI's own client."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from edge_llm_batch.lines import read_lines
from edge_llm_batch.results import ResultFile
from edge_llm_server import batches as batches_module
from edge_llm_server import files as files_module
from edge_llm_server.api_error import ApiError
from edge_llm_server.batches import Batches
from edge_llm_server.exchange import Log
from edge_llm_server.files import FileStore
from edge_llm_server.keys import ApiKey
from edge_llm_server.multipart import read_form
from edge_llm_server.routes_batches import _pieces

from edge_llm.engine.client import ThreadClient
from edge_llm.errors import StorageError
from tests.engine.fakes import PARIS, make_core, says
from tests.server.harness import Running, host_of, running
from tests.server.test_life import Gate, until

KEYS = (ApiKey.of("ann", "a" * 32), ApiKey.of("bob", "b" * 32))


def client_of(server: Running, letter: str = "a") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=letter * 32, max_retries=0)


def line(number: int, **body: Any) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": f"Question {number}"}], "temperature": 0, "max_tokens": 3}
    return {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, **body}}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(lambda: make_core(says(PARIS)), keys=KEYS, batches=tmp_path / "batches") as made:
        yield made


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"))
    return client.batches.retrieve(batch_id)


def test_files_are_kept_and_given_back(server: Running, tmp_path: Path) -> None:
    content = jsonl(line(1)) + "Ünïcode\r\n--x\r\n".encode()
    with client_of(server) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "in.jsonl", "batch")
        assert client.files.content(file.id).read() == content
        assert client.files.retrieve(file.id).id == file.id
        assert [one.id for one in client.files.list()] == [file.id]
        stored = [path for path in (tmp_path / "batches").iterdir() if path.is_file()]
        assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in stored if path.name != "lock")
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        assert not list((tmp_path / "batches").glob("file-*"))


def test_lists_are_given_in_the_parts_that_were_asked_for(server: Running) -> None:
    with client_of(server) as client:
        made = [client.files.create(file=(f"{i}.jsonl", b"x"), purpose="batch").id for i in range(5)]
        whole = [file.id for file in client.files.list()]
        assert sorted(whole) == sorted(made)
        page = client.files.list(limit=2)
        assert ([file.id for file in page.data], page.has_more) == (whole[:2], True)
        assert [file.id for file in page] == whole, "the client asks for the pages after it"
        assert [file.id for file in client.files.list(order="asc", limit=2)] == whole[::-1]
        assert list(client.files.list(purpose="vision")) == []
        for odd in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "file-x"}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.files.list(extra_query=odd)
            assert caught.value.param == next(iter(odd))


def test_what_is_no_file_for_a_batch_is_refused(server: Running) -> None:
    with client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.create(file=b"x", purpose="fine-tune")
        assert caught.value.param == "purpose"
        for name in ("../../etc/passwd", "file-" + "0" * 24, "x"):
            reply = httpx.get(f"{server.url}/v1/files/{name}", headers={"authorization": f"Bearer {'a' * 32}"})
            assert reply.status_code == 404


def test_a_batch_is_answered(server: Running) -> None:
    lines = [line(1), line(2, max_tokens=-5), line(3), {"custom_id": "q4", "method": "GET"}, line(5, model="other")]
    with client_of(server) as client:
        file = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        assert (made.object, made.metadata, made.input_file_id) == ("batch", {"a": "b"}, file.id)
        batch = ended(client, made.id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 5, "completed": 2, "failed": 3}
        assert batch.completed_at >= batch.in_progress_at >= batch.created_at
        answers = [json.loads(one) for one in client.files.content(batch.output_file_id).read().splitlines()]
        assert {one["custom_id"] for one in answers} == {"q1", "q3"}
        assert all(one["response"]["body"]["choices"][0]["message"]["content"] == "Par" for one in answers)
        faults = [json.loads(one) for one in client.files.content(batch.error_file_id).read().splitlines()]
        assert {one["custom_id"] for one in faults} == {"q2", "q4", "q5"}
        assert [one.id for one in client.batches.list()] == [made.id]


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}, "response"),
        ("/v1/embeddings", {"input": ["Hello", "you"], "encoding_format": "base64"}, "list"),
    ],
)
def test_a_batch_may_be_of_any_endpoint_that_answers(server: Running, endpoint: str, body: Any, kind: str) -> None:
    lines = [{**line(1), "url": endpoint, "body": body}, line(2)]
    with client_of(server) as client:
        file = client.files.create(file=jsonl(*lines), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        batch = ended(client, made.id)
        (answer,) = map(json.loads, client.files.content(batch.output_file_id).read().splitlines())
        assert answer["response"]["body"]["object"] == kind
        (fault,) = map(json.loads, client.files.content(batch.error_file_id).read().splitlines())
        assert (fault["custom_id"], fault["error"]["code"]) == ("q2", "invalid_url")


def test_nobody_sees_what_is_somebody_elses(server: Running) -> None:
    with client_of(server, "a") as ann, client_of(server, "b") as bob:
        file = ann.files.create(file=jsonl(line(1)), purpose="batch")
        batch = ann.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert (list(bob.files.list()), list(bob.batches.list())) == ([], [])
        for ask in (
            lambda: bob.files.retrieve(file.id),
            lambda: bob.files.content(file.id),
            lambda: bob.files.delete(file.id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        ended(ann, batch.id)


def test_a_batch_can_be_cancelled_and_keeps_what_was_answered(tmp_path: Path) -> None:
    gate = Gate(slots=1)
    with running(gate, batches=tmp_path / "batches") as server, client_of(server) as client:
        file = client.files.create(file=jsonl(*map(line, range(6))), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        until(lambda: server.cores and server.core.free_slots == 0)
        until(lambda: bool(gate.let(1)) or client.batches.retrieve(made.id).request_counts.completed >= 2)
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
        gate.open()
        batch = ended(client, made.id)
        assert batch.status == "cancelled"
        done = client.files.content(batch.output_file_id).read().splitlines()
        assert 2 <= len(done) == batch.request_counts.completed < 6
        until(lambda: len(server.core._scheduler) == 0)


@pytest.mark.parametrize("look", ["all", "get"])
def test_a_disk_that_takes_long_holds_up_nobody_else(
    server: Running, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushing, flushed, looking = threading.Event(), threading.Event(), threading.Event()
    original = getattr(Batches, look)

    def slow(_descriptor: int) -> None:
        flushing.set()
        flushed.wait(30)

    def noted(*arguments: Any) -> Any:
        looking.set()
        return original(*arguments)

    with client_of(server) as client:
        first = begin(client, jsonl(line(1)))
        ended(client, first.id)
        file = client.files.create(file=("in.jsonl", jsonl(line(2))), purpose="batch")
        monkeypatch.setattr(os, "fsync", slow)
        monkeypatch.setattr(Batches, look, noted)
        asked = [
            lambda: client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
            lambda: client.batches.list() if look == "all" else client.batches.retrieve(first.id),
        ]
        threads = [threading.Thread(target=ask) for ask in asked]
        try:
            for thread, begun in zip(threads, (flushing, looking), strict=True):
                thread.start()
                assert begun.wait(30)
            assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
        finally:
            flushed.set()
            for thread in threads:
                thread.join()


def test_a_batch_goes_on_after_a_restart_and_answers_each_line_once(tmp_path: Path) -> None:
    gate = Gate(slots=1)
    with running(gate, batches=tmp_path / "batches") as server, client_of(server) as client:
        file = client.files.create(file=jsonl(*map(line, range(6))), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        until(lambda: bool(gate.let(1)) or client.batches.retrieve(made.id).request_counts.completed >= 2)
        gate.open()
        server.serving.stop()
    with (
        running(lambda: make_core(says("a" * 99)), batches=tmp_path / "batches") as server,
        client_of(server) as client,
    ):
        batch = ended(client, made.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 6)
        answers = [json.loads(one) for one in client.files.content(batch.output_file_id).read().splitlines()]
        assert sorted(one["custom_id"] for one in answers) == [f"q{i}" for i in range(6)]
        assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in answers} == {"aaa"}


def test_people_go_before_batches(tmp_path: Path) -> None:
    gate = Gate(slots=1, max_queued_requests=8)
    with running(gate, batches=tmp_path / "batches") as server, client_of(server) as client:
        file = client.files.create(file=jsonl(*map(line, range(4))), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        until(lambda: server.cores and len(server.core._scheduler) >= 2)
        replies: list[Any] = []
        person = threading.Thread(
            target=lambda: replies.append(
                client.chat.completions.create(model="fake", messages=line(9)["body"]["messages"], max_tokens=2)
            )
        )
        person.start()
        until(lambda: len(server.core._scheduler) >= 3)
        assert {one.owner for one in server.core._scheduler.sequences} == {"all batches", ""}
        until(lambda: bool(gate.let(1)) or bool(replies))
        person.join()
        assert client.batches.retrieve(made.id).request_counts.completed <= 2
        gate.open()
        assert ended(client, made.id).status == "completed"


def test_two_servers_do_not_answer_the_same_batches(tmp_path: Path) -> None:
    with running(batches=tmp_path / "batches"), pytest.raises(StorageError, match="another server"):
        Batches(tmp_path / "batches", host_of({}, lambda _: ThreadClient(make_core())), Log())


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        (None, (501, "not_supported_error")),
        (StorageError("/secret/home cannot be written"), (503, "unavailable_error")),
    ],
    ids=["private", "unwritable"],
)
def test_without_a_folder_it_says_why(batches: StorageError | None, told: tuple[int, str]) -> None:
    with running(batches=batches) as server:
        for path in ("files", "batches"):
            reply = httpx.get(f"{server.url}/v1/{path}")
            assert (reply.status_code, reply.json()["error"]["type"]) == told
            assert "secret" not in reply.text


def test_a_folder_that_takes_nothing_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm_server.batches.obstacle", lambda folder: f"{folder} cannot be written")
    with pytest.raises(StorageError, match="batches cannot be written"):
        Batches(tmp_path / "batches", host_of({}, lambda _: ThreadClient(make_core())), Log())
    monkeypatch.undo()
    (tmp_path / "batches" / "lock").mkdir()
    with pytest.raises(StorageError, match="lock: Is a directory"):
        Batches(tmp_path / "batches", host_of({}, lambda _: ThreadClient(make_core())), Log())


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EROFS, 503)])
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with client_of(server) as client:
        file = client.files.create(file=("in.jsonl", jsonl(line(1))), purpose="batch")
        before = sorted(path.name for path in (tmp_path / "batches").iterdir())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for attempt in (
                lambda: client.files.create(file=("in.jsonl", jsonl(line(2))), purpose="batch"),
                lambda: begin_with(client, file.id),
            ):
                with pytest.raises(openai.APIStatusError) as caught:
                    attempt()
                assert caught.value.status_code == status
        assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == before
        assert list(client.batches.list()) == []
        assert ended(client, begin_with(client, file.id).id).status == "completed"
    faults = [entry["fault"] for entry in server.log if entry.get("status") == status]
    assert len(faults) == 2
    assert all(fault.startswith("OSError at ") for fault in faults)


def begin_with(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")


def test_a_home_that_is_deleted_meanwhile_is_told(server: Running, tmp_path: Path) -> None:
    with client_of(server) as client:
        client.files.create(file=("in.jsonl", jsonl(line(1))), purpose="batch")
        shutil.rmtree(tmp_path / "batches")
        assert list(client.files.list()) == []
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("in.jsonl", jsonl(line(1))), purpose="batch")
        assert caught.value.status_code == 503
        assert client.chat.completions.create(model="fake", messages=line(9)["body"]["messages"], max_tokens=2).choices


def test_a_batch_waits_for_room_and_loses_nothing(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that cannot be written, and then not even the state of the batch."""
    monkeypatch.setattr("edge_llm_server.batches.PAUSE_S", 0.01)
    room, real_write, real_json = [2], ResultFile.write, batches_module.write_json

    def write(results: ResultFile, result: dict[str, Any]) -> None:
        if not room[0]:
            results._file.write(b'{"id": "batch_req_')  # what still found room
            raise StorageError("no space")
        room[0] -= 1
        real_write(results, result)

    def write_json(path: Path, value: dict[str, Any]) -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space")
        real_json(path, value)

    monkeypatch.setattr(ResultFile, "write", write)
    monkeypatch.setattr(batches_module, "write_json", write_json)
    with client_of(server) as client:
        file = client.files.create(file=("in.jsonl", jsonl(*map(line, range(6)))), purpose="batch")
        made = begin_with(client, file.id)
        until(lambda: len([entry for entry in server.log if entry["event"] == "batch"]) >= 3)
        assert client.batches.retrieve(made.id).status == "in_progress"
        room[0] = 100
        done = ended(client, made.id)
        assert (done.status, done.request_counts.completed) == ("completed", 6)
        results = [json.loads(text) for text in client.files.content(done.output_file_id).text.splitlines()]
        assert sorted(result["custom_id"] for result in results) == [f"q{number}" for number in range(6)]


@pytest.mark.parametrize("failing", ["file-", "batch_", "move"])
def test_a_batch_that_ends_while_the_disk_is_full_is_answered_once(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The note of its results' file, its own last state, or the move of the results cannot be written at first."""
    monkeypatch.setattr("edge_llm_server.batches.PAUSE_S", 0.01)
    folder, failures = tmp_path / "batches", []
    real_json, real_move = files_module.write_json, shutil.move

    def fail() -> None:
        if len(failures) < 3:
            failures.append(failing)
            raise OSError(errno.ENOSPC, "no space")

    def write_json(path: Path, value: dict[str, Any]) -> None:
        ends = value.get("purpose") == "batch_output" or value.get("status") == "completed"
        if path.name.startswith(failing) and ends:
            fail()
        real_json(path, value)

    def move(source: Path, target: Path) -> None:
        if failing == "move":
            fail()
        real_move(source, target)

    for module in (files_module, batches_module):
        monkeypatch.setattr(module, "write_json", write_json)
    monkeypatch.setattr(files_module.shutil, "move", move)
    with client_of(server) as client:
        file = client.files.create(file=("in.jsonl", jsonl(line(1), line(2, max_tokens=-5))), purpose="batch")
        done = ended(client, begin_with(client, file.id).id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 1)
        assert len(failures) == 3
        kept = {file.id, done.output_file_id, done.error_file_id}
        assert {one.id for one in client.files.list()} == kept
        assert {path.name for path in folder.glob("file-*") if not path.suffix} == kept
        for result in (done.output_file_id, done.error_file_id):
            assert len(client.files.content(result).read().splitlines()) == 1
        assert not [path for path in folder.iterdir() if path.suffix in (".output", ".errors")]


BOUNDARY = b"multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
FILE = PART % (b"file", b'; filename="f"', b"content")
PURPOSE = PART % (b"purpose", b"", b"batch")


def test_a_form_says_where_its_file_lies() -> None:
    body = PURPOSE + FILE + b"--x--\r\n"
    form = read_form(body, BOUNDARY)
    assert (form.fields, form.filename, body[form.start : form.end]) == ({"purpose": "batch"}, "f", b"content")
    assert read_form(body, b'multipart/form-data; charset=utf-8; boundary="x"') == form
    tricky = body.replace(b"content", b"--x\r\n--y--\r\n\r\n")
    form = read_form(tricky, BOUNDARY)
    assert tricky[form.start : form.end] == b"--x\r\n--y--\r\n\r\n"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", BOUNDARY),
        (b"--x--", BOUNDARY),
        (FILE + b"--x--", b"multipart/form-data"),
        (FILE + b"--x--", b"multipart/form-data; boundary="),
        (FILE + b"--x--", b"multipart/form-data; boundary=" + b"y" * 71),
        (FILE[:-6] + b"--y--", BOUNDARY),
        (FILE + FILE + b"--x--", BOUNDARY),
        (PURPOSE + b"--x--", BOUNDARY),
        (PURPOSE * 17 + FILE + b"--x--", BOUNDARY),
        (PART % (b"a", b"", b"z" * 2000) + FILE + b"--x--", BOUNDARY),
        (b"--x\r\nX: y\r\n\r\ndata\r\n--x--", BOUNDARY),
        (b"--x\r\n" + b"X: y\r\n" * 9000 + b"\r\ndata\r\n--x--", BOUNDARY),
        (b"junk" + FILE + b"--x--", BOUNDARY),
        (os.urandom(4000), BOUNDARY),
    ],
)
def test_what_is_no_form_is_a_400(body: bytes, kind: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_form(body, kind)
    assert caught.value.status == 400


# --- how much a key may leave here ---


def begin(client: openai.OpenAI, content: bytes) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


@pytest.mark.parametrize(
    "content",
    [b"x\n" * 9, b"x\n" * 8 + b"x", b"\n" * 9 + b"x", b"x" * (3 << 20) + b"\n" + b" x \n\n" * 8],
    ids=["lines", "no last end", "blank", "long and blank"],
)
def test_a_file_of_too_many_lines_is_no_batch(server: Running, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm_server.batch.MAX_LINES", 8)
    with client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="at most 8 lines") as caught:
            begin(client, content)
        assert (caught.value.param, caught.value.code) == ("input_file_id", "too_many_lines")
        batch = ended(client, begin(client, b"\n" * 8 + b"x\n" * 7 + b"x").id)
        assert (batch.status, batch.request_counts.failed) == ("completed", 8)


def test_results_count_and_end_a_batch_that_has_too_many(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm_server.files.MAX_BYTES", 3000)
    with client_of(server) as client:
        batch = ended(client, begin(client, b"x\n" * 1000).id)
        assert (batch.status, batch.request_counts.total) == ("failed", 1000)
        assert "delete some" in batch.errors.data[0].message
        errors = client.files.retrieve(batch.error_file_id)
        assert 1000 < errors.bytes < 2000
        assert len(client.files.content(errors.id).read().splitlines()) == batch.request_counts.failed < 10
        with pytest.raises(openai.RateLimitError):
            client.files.create(file=b"y" * 1000, purpose="batch")
        client.files.delete(errors.id)
        client.files.create(file=b"y" * 500, purpose="batch")


def test_a_batch_needs_room_for_its_results(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm_server.files.MAX_FILES", 2)
    with client_of(server) as client:
        ended(client, begin(client, b"x\n").id)
        with pytest.raises(openai.RateLimitError, match="delete some"):
            client.batches.create(
                input_file_id=client.files.list().data[0].id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )


def test_what_is_kept_counts_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm_server.files.MAX_BYTES", 1000)
    for size, fits in ((600, True), (600, False), (300, True)):
        store = FileStore(tmp_path / "files")
        scratch = store.scratch()
        scratch.write_bytes(b"x" * size)
        with contextlib.nullcontext() if fits else pytest.raises(ApiError):
            store.keep(scratch, 0, size, filename="f", purpose="batch", owner="ann")
        scratch.unlink()
    assert sorted(file.bytes for file in store.all("ann")) == [300, 600]


def test_reading_lines_ends_when_the_batch_is_cancelled(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while its lines are counted, before any of them is answered."""
    reached, go_on, read = threading.Event(), threading.Event(), []

    def slow(stream: Any, job: bytes) -> Iterator[Any]:
        for one in read_lines(stream, job):
            read.append(one)
            reached.set()
            assert go_on.wait(30)
            yield one

    monkeypatch.setattr("edge_llm_batch.lines.read_lines", slow)
    with client_of(server) as client:
        batch_id = begin(client, b"x\n" * 1000).id
        assert reached.wait(30)
        assert client.batches.cancel(batch_id).status == "cancelling"
        go_on.set()
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed, len(read)) == ("cancelled", 0, 1)


def test_a_file_is_read_no_faster_than_it_is_taken(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several readers that take nothing: what is read of the file for all of them is little, and the whole comes at last."""
    content = os.urandom(24 << 20)
    with client_of(server) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
    read, run = [], server.serving.engines.run

    async def noted(work: Any, *arguments: Any) -> Any:
        result = await run(work, *arguments)
        if isinstance(result, bytes):
            read.append(len(result))
        return result

    monkeypatch.setattr("edge_llm_server.routes_batches._pieces", lambda file, _run: _pieces(file, noted))
    head = f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: 127.0.0.1:{server.serving.port}\r\n"
    head += f"Authorization: Bearer {'a' * 32}\r\nRange: bytes=0-3\r\n\r\n"
    readers = []
    for _ in range(3):
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        reader.connect(("127.0.0.1", server.serving.port))
        reader.sendall(head.encode())
        readers.append(reader)
    until(lambda: len(read) >= 3)
    settled(lambda: len(read))
    assert max(read) <= 64 << 10
    assert sum(read) < 3 * len(content) // 2
    with http.client.HTTPResponse(readers[0]) as response:
        response.begin()
        assert (response.status, response.length) == (200, len(content))
        assert response.read() == content
    for reader in readers:
        reader.close()
    until(lambda: sum(entry.get("path", "").endswith("/content") for entry in server.log) == 3)


def settled(number: Callable[[], int]) -> None:
    """Returns when a number has not changed for a while."""
    before = -1
    while before != (now := number()):
        before = now
        time.sleep(0.3)


def half_an_upload(server: Running, length: int, letter: str = "a") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.serving.port), timeout=30)
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1:{server.serving.port}\r\nAuthorization: Bearer {letter * 32}\r\n"
    )
    head += f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + b"z" * (length // 2))
    return connection


def test_unfinished_uploads_are_few_and_count(server: Running, tmp_path: Path) -> None:
    def parts() -> int:
        return len(list((tmp_path / "batches").glob("part-*")))

    with client_of(server) as ann, client_of(server, "b") as bob:
        halves = [half_an_upload(server, 1000) for _ in range(4)]
        until(lambda: parts() == 4)
        with pytest.raises(openai.RateLimitError, match="are being received"):
            ann.files.create(file=b"x", purpose="batch")
        bob.files.create(file=b"x", purpose="batch")
        for half in halves:
            half.close()
        until(lambda: parts() == 0)
        ann.files.create(file=b"x", purpose="batch")


def test_an_upload_needs_room_before_it_is_received(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_llm_server.files.MAX_BYTES", 10_000)
    with client_of(server) as client:
        half = half_an_upload(server, 9000)
        until(lambda: len(list((tmp_path / "batches").glob("part-*"))) == 1)
        with pytest.raises(openai.RateLimitError, match="delete some"):
            client.files.create(file=b"y" * 2000, purpose="batch")
        with half_an_upload(server, 9000) as other, http.client.HTTPResponse(other) as response:
            response.begin()
            assert response.status == 429, "its second half was never waited for"
        half.close()
        until(lambda: not list((tmp_path / "batches").glob("part-*")))
        client.files.create(file=b"y" * 2000, purpose="batch")


def test_an_upload_of_unknown_length_takes_the_room_of_the_longest(server: Running) -> None:
    def form() -> Iterator[bytes]:
        yield PURPOSE
        yield FILE + b"--x--\r\n"

    headers = {"authorization": f"Bearer {'a' * 32}", "content-type": BOUNDARY.decode()}
    for owned, status in ((0, 200), ((1 << 30) - (63 << 20), 429)):
        assert server.serving._batches is not None
        server.serving._batches.files.count("ann", "other", owned)
        assert httpx.post(f"{server.url}/v1/files", content=form(), headers=headers).status_code == status


@pytest.mark.parametrize("turn_s", [0.0, 3600.0])
def test_batches_of_several_keys_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn_s: float) -> None:
    """Ann's first batch and her second, then Bob's: his is done before her first one where turns are short."""
    monkeypatch.setattr("edge_llm_server.batches.TURN_S", turn_s)
    gate, done = Gate(slots=1), []
    finalize = Batches._finalize

    def noted(self: Batches, batch: Any) -> None:
        done.append((batch.owner, batch.end))
        finalize(self, batch)

    monkeypatch.setattr(Batches, "_finalize", noted)
    with (
        running(gate, batches=tmp_path / "batches", keys=KEYS) as server,
        client_of(server) as ann,
        client_of(server, "b") as bob,
    ):
        first = begin(ann, jsonl(*map(line, range(12))))
        until(lambda: bool(server.cores) and server.core.free_slots == 0)
        others = [begin(ann, jsonl(line(1))), begin(bob, jsonl(line(1), line(2)))]
        gate.open()
        batches = [ended(ann, first.id), ended(ann, others[0].id), ended(bob, others[1].id)]
        assert [one.request_counts.completed for one in batches] == [12, 1, 2]
        answers = [json.loads(one) for one in ann.files.content(batches[0].output_file_id).read().splitlines()]
        assert sorted(one["custom_id"] for one in answers) == sorted(f"q{i}" for i in range(12)), "each once"
    short = [("bob", "completed"), ("ann", "completed"), ("ann", "completed")]
    long = [("ann", "completed"), ("bob", "completed"), ("ann", "completed")]
    assert done == (long if turn_s else short)
