"""Parses the request lines and formats the result lines of a batch. Opens no files.

The format is OpenAI's (https://platform.openai.com/docs/guides/batch). Lines are numbered from 1.
"""

import hashlib
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET, UnsetType

ID_PREFIX = "batch_req_"
"""Prefix of a result's id; the line number follows."""


class BatchRequest(msgspec.Struct, frozen=True):
    """One request of a batch."""

    number: int
    custom_id: str
    url: str
    body: bytes

    @property
    def request_id(self) -> str:
        """Request id for the engine, derived from the custom id alone, because default seeds depend on it."""
        return "batch-" + hashlib.sha256(self.custom_id.encode()).hexdigest()[:16]


class BadLine(msgspec.Struct, frozen=True):
    """A line without a valid request."""

    number: int
    custom_id: str | None
    reason: str


class Answered(msgspec.Struct):
    """The HTTP response in a result."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct):
    """Why a line failed."""

    code: str
    message: str
    """Starts with the line number."""


class AnsweredRequest(msgspec.Struct):
    """The request, in the line of a result with a receipt, so that the line is sufficient for `octavo verify`."""

    url: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct):
    """One line of the output."""

    id: str
    custom_id: str | None
    response: Answered | None
    error: Failure | None
    request: AnsweredRequest | UnsetType = UNSET
    """Set with receipts only; OpenAI's format has no such field."""

    @property
    def number(self) -> int:
        """Number of its line in the input.

        Raises:
            ValueError: the id has another form.
        """
        prefix, digits = self.id[: len(ID_PREFIX)], self.id[len(ID_PREFIX) :]
        if prefix != ID_PREFIX or not digits.isdecimal():
            raise ValueError(f"{self.id!r} is not the id of a result")
        return int(digits)


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Body(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


def read_lines(texts: Iterable[bytes]) -> Iterator[BatchRequest | BadLine]:
    """Yield the parsed lines of a file, skipping blank lines."""
    seen: dict[str, int] = {}
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        line = _read(number, text)
        if isinstance(line, BatchRequest) and (first := seen.setdefault(line.custom_id, number)) != number:
            line = BadLine(number, line.custom_id, f"custom_id {line.custom_id!r} is already used by line {first}")
        yield line


def _read(number: int, text: bytes) -> BatchRequest | BadLine:
    try:
        line = msgspec.json.decode(text, type=_Line)
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(number, _custom_id(text), str(error))
    if line.method != "POST":
        return BadLine(number, line.custom_id, f"method {line.method!r} is not POST")
    for name in ("stream", "background"):  # with these, the response does not contain the output
        if getattr(body, name):
            return BadLine(number, line.custom_id, f"{name} must not be true in a batch")
    return BatchRequest(number, line.custom_id, line.url, bytes(line.body))


def _custom_id(text: bytes) -> str | None:
    """Return the custom id of an otherwise invalid line, if it has one."""
    try:
        return msgspec.json.decode(text, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
