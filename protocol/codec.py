"""Messages to frames and back: one encoder and decoder per direction.

A message is one frame: a byte that names the union it belongs to, so that one that reaches the wrong socket is refused
before it is decoded, and the msgpack body. Two frames would cost a short message six times as much.
"""

from enum import IntEnum
from typing import Any, Generic, TypeVar

import msgspec

from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Event
from octavo.protocol.requests import Request
from octavo.protocol.steps import WorkerCommand, WorkerReply

T = TypeVar("T")


class Kind(IntEnum):
    """The first byte of every message: which union follows."""

    REQUEST = 1
    EVENT = 2
    WORKER_COMMAND = 3
    WORKER_REPLY = 4


class Codec(Generic[T]):
    """Encodes and decodes one union of messages. Not thread-safe: one per thread."""

    def __init__(self, kind: Kind, union: Any) -> None:
        self._kind = bytes([kind])
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: T) -> bytes:
        """Return the frame of a message."""
        return self._kind + self._encoder.encode(message)

    def decode(self, frame: bytes) -> T:
        """Return the message in a frame.

        Raises:
            ProtocolError: wrong kind, or a body that does not fit the union.
        """
        if frame[:1] != self._kind:
            raise ProtocolError(f"expected a message of kind {self._kind!r}, got {frame[:1]!r}")
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"malformed message: {error}") from error


def request_codec() -> Codec[Request]:
    """Frontend to core."""
    return Codec(Kind.REQUEST, Request)


def event_codec() -> Codec[Event]:
    """Core to frontend."""
    return Codec(Kind.EVENT, Event)


def worker_command_codec() -> Codec[WorkerCommand]:
    """Core to workers."""
    return Codec(Kind.WORKER_COMMAND, WorkerCommand)


def worker_reply_codec() -> Codec[WorkerReply]:
    """Workers to core."""
    return Codec(Kind.WORKER_REPLY, WorkerReply)
