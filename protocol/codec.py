"""Messages to frames and back: one encoder and decoder per direction.

A frame sequence is `[kind, body, buffer...]`. `kind` names the union that `body` belongs to, so a
frame that reaches the wrong socket is refused before it is decoded.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Generic, TypeVar

import msgspec

from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Event
from octavo.protocol.requests import Request
from octavo.protocol.steps import WorkerCommand, WorkerReply

T = TypeVar("T")


class Kind(IntEnum):
    """The first byte of every frame sequence: which union follows."""

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

    def encode(self, message: T) -> list[bytes]:
        """Return the frames of a message."""
        return [self._kind, self._encoder.encode(message)]

    def decode(self, frames: Sequence[bytes]) -> T:
        """Return the message in the frames.

        Raises:
            ProtocolError: wrong kind, wrong number of frames, or a body that does not fit the union.
        """
        if len(frames) != 2 or frames[0] != self._kind:
            raise ProtocolError(f"expected 2 frames of kind {self._kind!r}, got {len(frames)} frames")
        try:
            return self._decoder.decode(frames[1])
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
