"""`/v1/files` and `/v1/batches`: OpenAI's batch API."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive

from octavo.frontend.batch.directory import FINAL, BatchDirectory, DirectoryFullError, StoredBatch
from octavo.frontend.batch.service import ENDPOINTS, BatchService
from octavo.frontend.calls.http_call import may_see, tenant_name
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.body import decode
from octavo.frontend.http.body_reader import BodyRejected
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.form import form_with_file
from octavo.frontend.http.query import Paging
from octavo.frontend.http.request import JSON, ApiRequest, header_value
from octavo.frontend.http.route import streams_body
from octavo.frontend.http.schemas.batches import (
    Batch,
    BatchList,
    BatchRequestBody,
    DeletedFile,
    ExpiresAfter,
    FileList,
    FileObject,
    RequestCounts,
)
from octavo.protocol.errors import ConflictError, InvalidRequestError, ModelNotFoundError

WINDOW_S = 24 * 3600
MAX_FILE_BYTES = 2**29
MAX_UNFINISHED = 1000
"""Maximum number of batches that wait or run."""

MAX_METADATA = 16

_FORM_BYTES = 2**16
"""Bytes allowed for the other fields of an upload."""


class NotFoundError(ModelNotFoundError):
    """The file or batch does not exist, or this server has no batches at all."""

    param: Any = None
    """No field is named: the id is in the path."""


@streams_body
async def upload_file(state: CurrentState, http_request: ApiRequest) -> Response:
    """Upload a file of requests."""
    directory, tenant = _service(state).directory, tenant_name(http_request.scope)
    length = header_value(http_request.scope, b"content-length")
    upload = ApiRequest(http_request.scope, _LimitedReceive(http_request.receive, MAX_FILE_BYTES + _FORM_BYTES))
    try:
        if length.isdecimal():  # checked before receiving the file, which fills the system's temporary directory
            await asyncio.to_thread(directory.require_room, max(0, int(length) - _FORM_BYTES))
        async with form_with_file(upload, max_fields=16) as (form, file):
            if form.get("purpose") != "batch":
                raise InvalidRequestError("purpose must be batch: files have no other use here", "purpose")
            expiry_s = _expiry_s(form)
            name, size = file.filename or "file", file.size or 0
            stored = await asyncio.to_thread(directory.add_file, file.file, size, name, expiry_s, tenant)
    except BodyRejected as error:
        return error.response(http_request.scope)
    except ClientDisconnect:
        return Response(status_code=400)
    except DirectoryFullError:
        raise ConflictError(
            f"the files of this server would have more than {directory.max_bytes} bytes (--batch-dir-max-bytes): "
            "delete some"
        ) from None
    return _json(stored)


async def list_files(state: CurrentState, http_request: ApiRequest) -> Response:
    """List the files."""
    query = http_request.query_params
    stored = await asyncio.to_thread(_service(state).directory.files)
    files = [one.file for one in stored if may_see(http_request.scope, one.tenant)]
    if purpose := query.get("purpose"):
        files = [file for file in files if file.purpose == purpose]
    page = Paging.of(query, default=10_000, most=10_000).page(files, lambda file: file.id)
    ends = (page.items[0].id, page.items[-1].id) if page.items else (None, None)
    return _json(FileList(data=list(page.items), first_id=ends[0], last_id=ends[1], has_more=page.has_more))


async def retrieve_file(state: CurrentState, http_request: ApiRequest) -> Response:
    """Describe a file."""
    return _json(_file(_service(state).directory, http_request))


async def read_file(state: CurrentState, http_request: ApiRequest) -> Response:
    """Return the content of a file."""
    directory = _service(state).directory
    file = _file(directory, http_request)
    return FileResponse(directory.content_path(file.id), media_type="application/octet-stream", filename=file.filename)


async def delete_file(state: CurrentState, http_request: ApiRequest) -> Response:
    """Delete a file. Batches that were created from it continue."""
    directory = _service(state).directory
    file = _file(directory, http_request)
    directory.delete_file(file.id)
    return _json(DeletedFile(id=file.id))


async def create_batch(state: CurrentState, http_request: ApiRequest) -> Response:
    """Run a file of requests."""
    service = _service(state)
    request = decode(http_request.take_body(), BatchRequestBody)
    if request.endpoint not in ENDPOINTS:
        raise InvalidRequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if len(request.metadata or ()) > MAX_METADATA:
        raise InvalidRequestError(f"metadata may have at most {MAX_METADATA} entries", "metadata")
    no_file = InvalidRequestError(
        f"input_file_id: there is no file {request.input_file_id[:100]!r} of purpose batch", "input_file_id"
    )
    file = service.directory.file(request.input_file_id)
    if file is None or file.file.purpose != "batch" or not may_see(http_request.scope, file.tenant):
        raise no_file
    batches = await asyncio.to_thread(service.directory.batches)
    if sum(stored.batch.status not in FINAL for stored in batches) >= MAX_UNFINISHED:
        raise ConflictError(f"{MAX_UNFINISHED} batches wait or run: wait for their end, or cancel some")
    now = int(time.time())
    batch = Batch(
        id=f"batch_{secrets.token_hex(16)}",
        endpoint=request.endpoint,
        input_file_id=file.file.id,
        status="validating",
        created_at=now,
        expires_at=now + WINDOW_S,
        request_counts=RequestCounts(),
        metadata=request.metadata,
    )
    expiry = request.output_expires_after
    expiry_s, tenant = None if expiry is None else expiry.seconds, tenant_name(http_request.scope)
    try:
        await asyncio.to_thread(service.directory.add_batch, StoredBatch(batch, time.time_ns(), expiry_s, tenant))
    except FileNotFoundError:
        raise no_file from None
    service.wake()
    return _json(batch)


async def list_batches(state: CurrentState, http_request: ApiRequest) -> Response:
    """List the batches, the newest first."""
    stored = await asyncio.to_thread(_service(state).directory.batches)
    batches = [one.batch for one in stored if may_see(http_request.scope, one.tenant)]
    page = Paging.of(http_request.query_params).page(batches, lambda batch: batch.id)
    ends = (page.items[0].id, page.items[-1].id) if page.items else (None, None)
    return _json(BatchList(data=list(page.items), first_id=ends[0], last_id=ends[1], has_more=page.has_more))


async def retrieve_batch(state: CurrentState, http_request: ApiRequest) -> Response:
    """Describe a batch and its progress."""
    return _json(_batch(_service(state), http_request))


async def cancel_batch(state: CurrentState, http_request: ApiRequest) -> Response:
    """Cancel a batch; its results so far are kept."""
    service = _service(state)
    batch = _batch(service, http_request)
    if batch.status in FINAL:
        raise ConflictError(f"{batch.id} cannot be cancelled: it is {batch.status}")
    service.directory.cancel(batch.id)
    service.wake()
    return _json(_batch(service, http_request))


class _LimitedReceive:
    """The ASGI `receive` function of an upload, with a size limit.

    Args:
        receive: the ASGI receive function of the server.
        max_bytes: maximum size of the body.
    """

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0

    async def __call__(self) -> Message:
        """Return the next part.

        Raises:
            BodyRejected: the body is larger than `max_bytes`.
        """
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise BodyRejected(413, f"a file may have at most {MAX_FILE_BYTES} bytes")
        return message


def _service(state: AppState) -> BatchService:
    if state.batches is None:
        raise NotFoundError("this server runs no batches: start it with --batch-dir DIRECTORY")
    return state.batches


def _file(directory: BatchDirectory, http_request: ApiRequest) -> FileObject:
    file_id = http_request.path_params["file_id"]
    found = directory.file(file_id)
    if found is None or not may_see(http_request.scope, found.tenant):
        raise NotFoundError(f"there is no file {file_id[:100]!r}: it was deleted, or has expired")
    return found.file


def _batch(service: BatchService, http_request: ApiRequest) -> Batch:
    batch_id = http_request.path_params["batch_id"]
    found = service.directory.batch(batch_id)
    if found is None or not may_see(http_request.scope, found.tenant):
        raise NotFoundError(f"there is no batch {batch_id[:100]!r}")
    return found.batch


def _expiry_s(form: Mapping[str, Any]) -> int | None:
    """Return the seconds of `expires_after`, which a form has as two fields."""
    given = {name: form.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if given == {"anchor": None, "seconds": None}:
        return None
    try:
        return msgspec.convert(given, ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"expires_after: {error}", "expires_after") from None


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
