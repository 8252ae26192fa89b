"""What is known of a message that cannot be decoded: who waits for an answer to it, if it still says so.

Reads the first bytes of a body by hand, because the rest may be anything. Answers nobody.
"""

import re
import struct
from dataclasses import dataclass

from octavo.protocol.ids import RequestId

MAX_REQUEST_ID_BYTES = 1024
"""A longer name is none of ours, and must not be sent back."""

_ARRAY = rb"\x01(?:[\x90-\x9f]|\xdc..|\xdd....)"
"""The kind of a request, and the head of a msgpack array."""

_SUBMIT = re.compile(_ARRAY + rb"\xa6submit(?:([\xa0-\xbf])|\xd9(.)|\xda(..))", re.DOTALL)
_CALL = re.compile(_ARRAY + rb"\xa4call(?:([\x00-\x7f])|\xcc(.)|\xcd(..)|\xce(.{4})|\xcf(.{8}))", re.DOTALL)

_UNSIGNED = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I"), 8: struct.Struct(">Q")}


@dataclass(frozen=True)
class Malformed:
    """A message from a frontend that cannot be read."""

    fault: str
    """What is wrong with it."""
    request_id: RequestId | None = None
    """Of the `Submit` that it seems to be."""
    call_id: int | None = None
    """Of the `Call` that it seems to be."""


def examine(frame: bytes, fault: str) -> Malformed:
    """Return what can be told of a request's frame that does not decode.

    Args:
        frame: as it came.
        fault: what the decoder said.
    """
    if found := _SUBMIT.match(frame):
        return Malformed(fault, request_id=_text(frame, found))
    if found := _CALL.match(frame):
        digits = next(group for group in found.groups() if group is not None)
        return Malformed(fault, call_id=_number(digits))
    return Malformed(fault)


def _text(frame: bytes, found: "re.Match[bytes]") -> RequestId | None:
    """Return the text behind the head of a msgpack string, None when it is no request's name."""
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
