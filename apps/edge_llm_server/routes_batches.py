"""OpenAI's routes of files and batches: /v1/files, /v1/batches."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from edge_llm_batch.lines import MAX_LINE_BYTES
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from edge_llm.errors import StorageError
from edge_llm.install.staging import DISK_FULL
from edge_llm_server.api_error import ApiError
from edge_llm_server.batches import Batches
from edge_llm_server.body import parse_body
from edge_llm_server.exchange import STATE, place_of
from edge_llm_server.files import StoredFile
from edge_llm_server.multipart import read_form
from edge_llm_server.routes_openai import body_of
from edge_llm_server.schemas import Body, Text, Word, at_most
from edge_llm_server.service import Service
from edge_llm_server.translate import checked

MAX_UPLOADS = 4
"""of a key at a time"""
_PIECE_BYTES = 64 << 10


class BatchBody(Body):
    """POST /v1/batches. Lines are answered as soon as there is time: `completion_window` is taken and changes nothing."""

    input_file_id: Word
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Word = "24h"
    model: Word | None = None
    """which of the served models answers; else the one that the first line names"""
    metadata: Annotated[dict[str, Text], at_most(16)] | None = None


class ListQuery(BaseModel):
    """GET /v1/files and /v1/batches."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    after: Word | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: Word | None = None


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    run = service.engines.run
    uploading: Counter[str] = Counter()

    def batches() -> Batches:
        if service.batches is None:
            raise ApiError(501, "files and batches are kept on disk, which --private forbids")
        if isinstance(service.batches, StorageError):
            raise ApiError.unavailable("files and batches cannot be kept by this server: its first lines say why")
        return service.batches

    @routes.post("/v1/files")
    async def upload(request: Request) -> Any:
        store, owner = batches().files, _owner(request)
        if uploading[owner] >= MAX_UPLOADS:
            raise ApiError.too_many(f"{MAX_UPLOADS} files of this key are being received", 1.0)
        scratch = store.scratch()
        most = left = int(request.headers.get("content-length", service.settings.max_upload_bytes))
        store.take(owner, scratch.name, most)
        uploading[owner] += 1
        try:
            with _written(request), scratch.open("xb", 0) as file:
                with contextlib.suppress(OSError):  # not every file system has rights
                    scratch.chmod(0o600)
                async for piece in request.stream():
                    left -= len(piece)
                    if left < 0:
                        raise ApiError(413, f"the body has more than the {most} bytes that were announced")
                    await run(file.write, piece)
            with _written(request):
                kept = await run(_keep, batches(), scratch, request.headers.get("content-type", ""), owner)
            return kept.shown()
        finally:
            uploading[owner] -= 1
            with contextlib.suppress(OSError):
                scratch.unlink()
            store.give_back(owner, scratch.name)

    @routes.get("/v1/files")
    async def files(request: Request) -> Any:
        return _listed([file.shown() for file in await run(batches().files.all, _owner(request))], request)

    @routes.get("/v1/files/{file_id}")
    async def file(request: Request, file_id: str) -> Any:
        return (await run(batches().files.get, file_id, _owner(request))).shown()

    @routes.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Any:
        found = await run(batches().files.get, file_id, _owner(request))
        file = await run(_opened, batches().files.path(found.id))
        headers = {"content-length": str(os.fstat(file.fileno()).st_size)}
        return StreamingResponse(_pieces(file, run), headers=headers, media_type="application/octet-stream")

    @routes.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Any:
        found = await run(batches().files.get, file_id, _owner(request))
        with _written(request):
            await run(batches().files.delete, found)
        return {"id": found.id, "object": "file", "deleted": True}

    @routes.post("/v1/batches")
    async def create(request: Request) -> Any:
        body = await body_of(request, BatchBody)
        with _written(request):
            model = body.model or await run(_model_of, batches(), body.input_file_id, _owner(request))
            made = await run(
                lambda: batches().create(
                    owner=_owner(request),
                    model=service.engines.name_of(model),
                    endpoint=body.endpoint,
                    input_file_id=body.input_file_id,
                    window=body.completion_window,
                    metadata=body.metadata,
                )
            )
        return made.shown()

    @routes.get("/v1/batches")
    async def listed(request: Request) -> Any:
        return _listed([batch.shown() for batch in await run(batches().all, _owner(request))], request)

    @routes.get("/v1/batches/{batch_id}")
    async def batch(request: Request, batch_id: str) -> Any:
        return (await run(batches().get, batch_id, _owner(request))).shown()

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Any:
        with _written(request):
            return (await run(batches().cancel, batch_id, _owner(request))).shown()

    return routes


@contextlib.contextmanager
def _written(request: Request) -> Iterator[None]:
    """Files are read and written meanwhile. Raises `ApiError` where the disk is full or does not let us."""
    try:
        yield
    except OSError as error:
        request.scope[STATE].fault = place_of(error)
        if error.errno in DISK_FULL:
            raise ApiError(507, "the server's disk is full: nothing was kept", code="disk_full") from None
        raise ApiError.unavailable("the server cannot read or write its files: nothing was kept") from None


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb", 0)
    except FileNotFoundError:
        raise ApiError(404, "the file was deleted", code="file_not_found") from None


async def _pieces(file: BinaryIO, run: Callable[..., Awaitable[Any]]) -> AsyncIterator[bytes]:
    """What a file holds, no faster than it is taken."""
    with file:
        while piece := await run(file.read, _PIECE_BYTES):
            yield piece


def _owner(request: Request) -> str:
    owner: str = request.scope[STATE].key
    return owner


def _model_of(batches: Batches, file_id: str, owner: str) -> str | None:
    """The model that the first line of a file names. Raises `ApiError` for a file that is not there."""
    with batches.files.path(batches.files.get(file_id, owner).id).open("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
    try:
        model = parse_body(line)["body"]["model"]
    except (ApiError, LookupError, TypeError):
        return None  # what is wrong with it is said when it is answered
    return model if isinstance(model, str) else None


def _keep(batches: Batches, scratch: Path, content_type: str, owner: str) -> StoredFile:
    """Stores the one file of the form that was received."""
    with scratch.open("rb") as file:
        if not scratch.stat().st_size:
            raise ApiError.invalid("the form is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            form = read_form(data, content_type.encode("latin-1", "replace"))
    if form.fields.get("purpose") != "batch":
        raise ApiError.invalid("the purpose of a file is `batch` here", "purpose")
    return batches.files.keep(scratch, form.start, form.end, filename=form.filename, purpose="batch", owner=owner)


def _listed(entries: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """The part of the `entries`, newest first, that the request's query asks for. Raises `ApiError`."""
    query = checked(ListQuery, request.query_params)
    if query.purpose is not None:
        entries = [entry for entry in entries if entry.get("purpose") == query.purpose]
    if query.order == "asc":
        entries = entries[::-1]
    ids = [entry["id"] for entry in entries]
    if query.after is not None and query.after not in ids:
        raise ApiError.invalid("there is nothing with the id that is given as after", "after")
    first = 0 if query.after is None else ids.index(query.after) + 1
    page = entries[first : first + query.limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": first + query.limit < len(entries)}
