"""Extracts the id from a malformed request, so that the waiting frontend receives a reply.

Parses the first bytes of a body by hand, because the rest may be anything.
"""

import re
import struct
from dataclasses import dataclass

from octavo.protocol.ids import RequestId

MAX_REQUEST_ID_BYTES = 1024
"""Frontends use no longer ids, and a longer id must not be sent back."""

_ARRAY = rb"\x01(?:[\x90-\x9f]|\xdc..|\xdd....)"
"""The kind byte of a request, and the header of a msgpack array."""

_SUBMIT = re.compile(_ARRAY + rb"\xa6submit(?:([\xa0-\xbf])|\xd9(.)|\xda(..))", re.DOTALL)
_CALL = re.compile(_ARRAY + rb"\xa4call(?:([\x00-\x7f])|\xcc(.)|\xcd(..)|\xce(.{4})|\xcf(.{8}))", re.DOTALL)

_UNSIGNED = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I"), 8: struct.Struct(">Q")}


@dataclass(frozen=True)
class Malformed:
    """A message from a frontend that cannot be decoded."""

    fault: str
    """The decoder's error message."""
    request_id: RequestId | None = None
    """The id, if the message looks like a `Submit`."""
    call_id: int | None = None
    """The id, if the message looks like a `Call`."""


def parse_malformed(frame: bytes, fault: str) -> Malformed:
    """Return what is recognizable in the body of a malformed request.

    Args:
        frame: the frame as received.
        fault: the decoder's error message.
    """
    if found := _SUBMIT.match(frame):
        return Malformed(fault, request_id=_text(frame, found))
    if found := _CALL.match(frame):
        digits = next(group for group in found.groups() if group is not None)
        return Malformed(fault, call_id=_number(digits))
    return Malformed(fault)


def _text(frame: bytes, found: "re.Match[bytes]") -> RequestId | None:
    """Return the text after the header of a msgpack string. Return None if it cannot be a request id."""
    short, *long = found.groups()
    size = short[0] & 0x1F if short else _number(next(group for group in long if group is not None))
    text = frame[found.end() : found.end() + size]
    if len(text) < size or size > MAX_REQUEST_ID_BYTES:
        return None
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _number(digits: bytes) -> int:
    value: int = _UNSIGNED[len(digits)].unpack(digits)[0]
    return value
