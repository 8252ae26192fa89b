"""Request bodies: reading them within a limit, and decoding them with errors that name the field."""

import logging
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from octavo.frontend.http.later import HARMLESS_FIELDS, LATER_FEATURES, refuse_later_features
from octavo.protocol.errors import InvalidRequestError

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

MAX_BODY_BYTES = 64 * 2**20


async def read_request(request: Request, schema: type[T]) -> T:
    """Read the body and decode it.

    Raises:
        InvalidRequestError: the body is no JSON object, or a field is wrong; `param` is its path.
        HTTPException: 413, the body is larger than `MAX_BODY_BYTES`.
    """
    return decode(await _read(request), schema)


def decode(body: bytes, schema: type[T]) -> T:
    """Decode a JSON object; fields that the schema does not have are accepted with a warning in the log.

    Raises:
        InvalidRequestError: as for `read_request`.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InvalidRequestError("the body must be a JSON object")
    refuse_later_features(raw)
    try:
        decoded = msgspec.convert(raw, schema, str_keys=True)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    _warn_of_unknown(raw, schema)
    return decoded


def _field_error(text: str) -> InvalidRequestError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.stop[0]`" into an error that names "stop[0]".

    Of a key of an object msgspec says "at `key` in `$.logit_bias`".
    """
    what, _, where = text.replace("Object missing required field", "missing required field").partition(" - at ")
    what = what.replace("`", "")
    path = where.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    if not path and what.startswith("missing required field"):
        return InvalidRequestError(what, what.split()[-1])
    return InvalidRequestError(f"{path}: {what}" if path else what, path or None)


def _warn_of_unknown(raw: dict[str, Any], schema: type[msgspec.Struct]) -> None:
    unknown = raw.keys() - set(schema.__struct_encode_fields__) - LATER_FEATURES.keys() - HARMLESS_FIELDS
    if unknown:
        logger.warning("ignored unknown request fields: %s", ", ".join(repr(name) for name in sorted(unknown)))


async def _read(request: Request) -> bytes:
    chunks = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
