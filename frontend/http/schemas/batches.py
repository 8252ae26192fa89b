"""`/v1/files` and `/v1/batches`: OpenAI's batch API, requests and responses. Batches are stored in this format too.

Source: the API's published reference, and the types of its Python client.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * 24 * 3600


class ExpiresAfter(Struct, kw_only=True):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class FileObject(Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(Struct, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedFile(Struct, kw_only=True):
    """A file was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchRequestBody(Struct, kw_only=True):
    """A file of requests to run."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class RequestCounts(Struct, kw_only=True):
    """Number of requests by state."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(Struct, kw_only=True):
    """Details of the prompt tokens."""

    cached_tokens: int = 0


class OutputDetails(Struct, kw_only=True):
    """Details of the output tokens."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, kw_only=True):
    """Token usage of all responses."""

    input_tokens: int = 0
    input_tokens_details: InputDetails
    output_tokens: int = 0
    output_tokens_details: OutputDetails
    total_tokens: int = 0


class BatchError(Struct, kw_only=True):
    """Why a batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, kw_only=True):
    """All errors, or the first ones."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class Batch(Struct, kw_only=True):
    """A batch and its progress."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class BatchList(Struct, kw_only=True):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


FILE_FIELDS: dict[str, Any] = {
    "purpose": {"type": "string", "enum": ["batch"]},
    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
    "expires_after[seconds]": {"type": "string"},
}
"""Schemas of the upload form's fields by name, without `file`."""
