"""Request bodies: from JSON to a schema, with errors that name the field."""

import logging
from functools import cache
from typing import Any, TypeVar

import msgspec

from octavo.frontend.http.later import HARMLESS_FIELDS, LATER_FEATURES, refuse_later_features
from octavo.protocol.errors import InvalidRequestError

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Looks no further than the names of an object's members."""


def decode(body: bytes, schema: type[T]) -> T:
    """Decode a JSON object; fields that the schema does not have are accepted with a warning in the log.

    Raises:
        InvalidRequestError: the body is no JSON object, or a field is wrong; `param` is its path.
    """
    fields, decoder = _known(schema)
    try:
        if _decode_names(body).keys() <= fields:
            decoded: T = decoder.decode(body)
            return decoded
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # what is wrong, and with which field, is found below
    return _decode_with_care(body, schema)


@cache
def _known(schema: type[T]) -> "tuple[frozenset[str], msgspec.json.Decoder[T]]":
    """Return the fields of a schema that need no second look, and its decoder."""
    return frozenset(schema.__struct_encode_fields__), msgspec.json.Decoder(schema)


def _decode_with_care(body: bytes, schema: type[T]) -> T:
    """Decode what is not plainly right: unknown or unsupported fields, or errors that must be named."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InvalidRequestError("the body must be a JSON object")
    refuse_later_features(raw, schema.__struct_encode_fields__)
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
