"""Messages to frames and back: one encoder and decoder per direction.

The first frame of a message is one byte that names its union, followed by the msgpack body. So a message on the wrong
socket is rejected before it is decoded. Most messages have only this frame: a second one would make a short message six
times as expensive. Large binary values (`Buffer`, `IdArray`) follow in separate frames, which are neither copied into
the body nor out of it; the body holds their index.
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from octavo.protocol.buffers import MAX_BUFFERS_BYTES, Buffer
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Event
from octavo.protocol.ids import IdArray, unpack_ids
from octavo.protocol.requests import FrontendMessage
from octavo.protocol.worker_commands import WorkerCommand, WorkerReply

T = TypeVar("T")

Frame: TypeAlias = bytes | memoryview

MIN_BUFFER_BYTES = 2**16
"""Smaller binary values stay in the body, because copying them is cheaper than a frame."""

MAX_BUFFERS = 256
"""Most buffer frames of one message."""


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
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_value)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union, dec_hook=self._decode_value)
        self._buffers: list[Frame] = []
        """Buffers of the message being encoded."""
        self._received: Sequence[Frame] = ()
        """Buffer frames of the message being decoded."""
        self._num_used = 0
        """Number of frames in `_received` to which the body has referred."""

    def encode(self, message: T) -> list[Frame]:
        """Return the frames of a message. Its buffers are not copied.

        Raises:
            TypeError, OverflowError, UnicodeEncodeError: a value cannot be encoded.
        """
        self._buffers = []
        body = self._kind + self._encoder.encode(message)
        return [body, *self._buffers]

    def decode(self, body: Frame, *buffers: Frame) -> T:
        """Return the message in these frames. Its `Buffer`s refer to the frames' memory.

        Raises:
            ProtocolError: wrong kind, a body that does not fit the union, or buffers that do not fit the body.
        """
        if body[:1] != self._kind:
            raise ProtocolError(f"expected a message of kind {self._kind!r}, got {bytes(body[:1])!r}")
        if buffers:
            _check_buffers(buffers)
        self._received, self._num_used = buffers, 0
        try:
            message = self._decoder.decode(memoryview(body)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"malformed message: {error}") from error
        finally:
            self._received = ()
        if self._num_used != len(buffers):
            raise ProtocolError(f"malformed message: its body uses {self._num_used} of its {len(buffers)} buffers")
        return message

    def _encode_value(self, value: object) -> object:
        data = wire_bytes(value)
        if data.nbytes < MIN_BUFFER_BYTES:
            return data
        self._buffers.append(data)
        return len(self._buffers) - 1

    def _decode_value(self, kind: type, value: object) -> object:
        return wire_value(kind, self._buffer(value) if isinstance(value, int) else value)

    def _buffer(self, index: int) -> Frame:
        if isinstance(index, bool) or index != self._num_used or index >= len(self._received):
            raise ValueError(f"buffer {index} where {self._num_used} of {len(self._received)} were used")
        self._num_used += 1
        return self._received[index]


def wire_bytes(value: object) -> memoryview:
    """Return the bytes of a value for which msgpack has no type. Files use it as `enc_hook`, because they have no
    frames.

    Raises:
        NotImplementedError: messages have no values of this type.
    """
    if isinstance(value, array):
        return memoryview(value).cast("B")
    if isinstance(value, Buffer):
        return memoryview(value.data).cast("B")
    raise NotImplementedError


def wire_value(kind: type, data: object) -> object:
    """Return the value of a type that `wire_bytes` supports. Files use it as `dec_hook`.

    Raises:
        ValueError: the data does not encode such a value.
    """
    if not isinstance(data, bytes | memoryview):
        raise ValueError(f"expected bytes, got {type(data).__name__}")
    return unpack_ids(data) if kind is IdArray else Buffer(data)


def _check_buffers(buffers: Sequence[Frame]) -> None:
    if len(buffers) > MAX_BUFFERS:
        raise ProtocolError(f"malformed message: more than {MAX_BUFFERS} buffers")
    if (num_bytes := sum(map(len, buffers))) > MAX_BUFFERS_BYTES:
        raise ProtocolError(f"malformed message: {num_bytes} bytes of buffers, at most {MAX_BUFFERS_BYTES} are read")


def request_codec() -> Codec[FrontendMessage]:
    """Return a codec for messages from frontend to core."""
    return Codec(Kind.REQUEST, FrontendMessage)


def event_codec() -> Codec[Event]:
    """Return a codec for messages from core to frontend."""
    return Codec(Kind.EVENT, Event)


def worker_command_codec() -> Codec[WorkerCommand]:
    """Return a codec for messages from core to workers."""
    return Codec(Kind.WORKER_COMMAND, WorkerCommand)


def worker_reply_codec() -> Codec[WorkerReply]:
    """Return a codec for messages from workers to core."""
    return Codec(Kind.WORKER_REPLY, WorkerReply)
