"""Messages are decoded as they were encoded; anything else is rejected."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import MESSAGES

from octavo.protocol import codec, events
from octavo.protocol.errors import ProtocolError


@pytest.mark.parametrize(("codec_", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_survives(codec_: codec.Codec, message: msgspec.Struct) -> None:
    frames = codec_.encode(message)
    decoded = codec_.decode(*frames)
    assert decoded == message
    assert type(decoded) is type(message)


def test_float32_logprobs_keep_their_bits() -> None:
    import struct

    value = struct.unpack("<f", struct.pack("<f", -1.2345678))[0]
    (frame,) = codec.event_codec().encode(
        events.Events(0, [events.Tokens("r", [1], [events.TokenLogprobs([1], [value], 1)])])
    )
    back = codec.event_codec().decode(frame).events[0].logprobs[0].logprobs[0]
    assert struct.pack("<d", back) == struct.pack("<d", value)


def test_a_frame_of_another_kind_is_rejected() -> None:
    (frame,) = codec.event_codec().encode(events.EngineDying(""))
    with pytest.raises(ProtocolError, match="kind"):
        codec.request_codec().decode(frame)


def test_a_frame_of_nothing_is_rejected() -> None:
    with pytest.raises(ProtocolError):
        codec.request_codec().decode(b"")


@given(st.binary(max_size=200))
def test_garbage_raises_protocol_error_only(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.request_codec().decode(b"\x01" + body)


@given(st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats(), st.lists, max_leaves=30))
def test_well_formed_nonsense_raises_protocol_error_only(value: object) -> None:
    with pytest.raises(ProtocolError):
        codec.request_codec().decode(b"\x01" + msgspec.msgpack.encode(value))


def test_deep_nesting_is_rejected() -> None:
    with pytest.raises(ProtocolError):
        codec.request_codec().decode(b"\x01" + b"\x91" * 100_000 + b"\xc0")
