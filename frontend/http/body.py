"""Request bodies: JSON to a schema, with errors that name the field, and one warning per unknown field."""

import logging
from functools import cache
from typing import Any, TypeVar

import msgspec

from octavo.frontend.http.errors import BodyError
from octavo.frontend.http.log_once import MAX_NAME_CHARS, LogOnce
from octavo.frontend.http.unsupported_fields import HARMLESS_FIELDS, UNSUPPORTED_FIELDS, reject_unsupported_fields
from octavo.protocol.errors import InvalidRequestError

_unknown_fields = LogOnce(
    logging.getLogger(__name__),
    "ignored the unknown request field %r; further occurrences of this field are not logged",
)

T = TypeVar("T", bound=msgspec.Struct)

MAX_BAD_KEYS = 8
"""Number of invalid `logit_bias` keys that an error shows."""

MAX_VALUES = 2**19
"""Maximum number of values in a body. A decoded value takes up to twenty times its bytes, and all exist at the same
time."""


def decode(body: bytes, schema: type[T]) -> T:
    """Decode a JSON object. Fields that the schema does not have are accepted, with a warning the first time.

    Raises:
        InvalidRequestError: the body is not a JSON object, or a field is invalid; `param` is its path.
    """
    # Every value but the first follows a comma. Commas inside strings count too: excluding them would take seconds.
    if len(body) > MAX_VALUES and body.count(b",") >= MAX_VALUES:
        raise BodyError(f"the body has more than {MAX_VALUES} values and commas")
    try:
        decoded: T = _strict_decoder(schema).decode(body)
        return decoded
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_with_care(body, schema)


@cache
def _strict_decoder(schema: type[T]) -> "msgspec.json.Decoder[T]":
    """Return a decoder that rejects unknown fields, so that a body without unknown fields is parsed only once."""
    strict = msgspec.defstruct(schema.__name__, [], bases=(schema,), forbid_unknown_fields=True)
    return msgspec.json.Decoder(strict)


def _decode_with_care(body: bytes, schema: type[T]) -> T:
    """Decode a body that the strict decoder rejected; report unknown fields, unsupported fields and errors."""
    try:
        raw = msgspec.json.decode(body)
    except msgspec.ValidationError:
        raise _number_error(body, schema) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BodyError("the body must be a JSON object")
    reject_unsupported_fields(raw, schema.__struct_encode_fields__)
    try:
        decoded = msgspec.json.decode(body, type=schema)  # decoded again: a converter does not support msgspec.Raw
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequestError) and " - at " not in str(error):
            raise error.__cause__ from None  # raised by the schema's own check, which knows the field
        raise _with_bad_keys(_field_error(str(error)), raw) from None
    _warn_of_unknown(raw, schema)
    return decoded


def _number_error(body: bytes, schema: type[msgspec.Struct]) -> BodyError:
    """Return the error for a body with a number that is out of range; decoding by schema finds its field."""
    try:
        msgspec.json.decode(body, type=schema)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _field_error(str(error))
    return BodyError("the body has a number that is out of range")


def _field_error(text: str) -> BodyError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.stop[0]`" into an error that names "stop[0]".

    For a key of an object, msgspec writes "at `key` in `$.logit_bias`".
    """
    what, _, where = text.replace("Object missing required field", "missing required field").partition(" - at ")
    what = what.replace("`", "")
    path = where.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    if not path and what.startswith("missing required field"):
        return BodyError(what, what.split()[-1])
    return BodyError(f"{path}: {what}" if path else what, path or None)


def _with_bad_keys(error: BodyError, raw: dict[str, Any]) -> BodyError:
    """Add the keys that are not token ids to an error about `logit_bias`, which does not name them."""
    biases = raw.get("logit_bias")
    if error.param != "logit_bias" or not isinstance(biases, dict):
        return error
    bad = [key[:MAX_NAME_CHARS] for key in biases if not key.lstrip("-").isdecimal()]
    if not bad:
        return error
    more = f" and {len(bad) - MAX_BAD_KEYS} more" if len(bad) > MAX_BAD_KEYS else ""
    shown = ", ".join(map(repr, bad[:MAX_BAD_KEYS]))
    return BodyError(f"logit_bias: keys must be token ids, written as integers, not {shown}{more}", error.param)


def _warn_of_unknown(raw: dict[str, Any], schema: type[msgspec.Struct]) -> None:
    unknown = raw.keys() - set(schema.__struct_encode_fields__) - UNSUPPORTED_FIELDS.keys() - HARMLESS_FIELDS
    for name in sorted(unknown):
        _unknown_fields.warning(name)
