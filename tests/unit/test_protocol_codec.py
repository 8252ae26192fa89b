"""Messages survive the wire, and nothing else gets through."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.protocol import codec, events, requests, steps
from octavo.protocol.errors import ProtocolError
from octavo.protocol.params import SamplingSpec
from octavo.protocol.stats import EngineStats, RequestTimings

SPEC = SamplingSpec(max_tokens=5, seed=2**64 - 1, stop_token_ids=(3,), logit_bias=((1, -2.5),))
LOGPROBS = events.TokenLogprobs([4, 4, 9], [-0.1, -0.1, -2.0], 1)
FACTS = events.EngineFacts(1, "path", ["name"], 100, 50, 16, 10, 8, 20, "float32", "cpu", b"config", "pulse")

MESSAGES = [
    (codec.request_codec(), requests.Connect(client="test")),
    (codec.request_codec(), requests.Submit("r", [1, 2], SPEC, 3, "salt", None, [7])),
    (codec.request_codec(), requests.Abort(["a", "b"])),
    (codec.request_codec(), requests.Call(1, requests.StartProfile("dir"))),
    (codec.request_codec(), requests.Call(2, requests.ResetPrefixCache())),
    (codec.event_codec(), events.Welcome(FACTS)),
    (codec.event_codec(), events.Refused("no")),
    (
        codec.event_codec(),
        events.Events(
            1,
            [
                events.Tokens("r", [4], [LOGPROBS], [None, LOGPROBS], 16),
                events.Finished("r", events.FinishReason.STOP, 3, 16, 1, RequestTimings(1.0, 2.0, 3.0, 4.0)),
                events.Failed("s", events.FailureKind.INVALID, "too long", "prompt"),
            ],
        ),
    ),
    (codec.event_codec(), events.Reply(1, EngineStats(num_running=2))),
    (codec.event_codec(), events.Reply(1, events.CallFailed("no"))),
    (codec.event_codec(), events.StatsReport(EngineStats(num_blocks=4, num_free_blocks=3))),
    (codec.event_codec(), events.EngineDying("cause")),
    (
        codec.worker_command_codec(),
        steps.StepPlan(
            0,
            [1],
            [steps.Admitted(0, "r", [1, 2], 2, [5], SPEC)],
            [steps.Appended(2, [6])],
            [steps.Scheduled(0, 0, 2, True)],
        ),
    ),
    (codec.worker_command_codec(), steps.AllocateCache(0, 10, 100)),
    (codec.worker_command_codec(), steps.Profile(0, None)),
    (codec.worker_command_codec(), steps.Stop(0)),
    (codec.worker_reply_codec(), steps.StepResult(0, [4], [LOGPROBS], [(0, [LOGPROBS])], 0.5)),
    (codec.worker_reply_codec(), steps.CommandFailed(0, 0, "ValueError", "bad", "trace")),
]


@pytest.mark.parametrize(("codec_", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_survives(codec_: codec.Codec, message: msgspec.Struct) -> None:
    frame = codec_.encode(message)
    decoded = codec_.decode(frame)
    assert decoded == message
    assert type(decoded) is type(message)


def test_float32_logprobs_keep_their_bits() -> None:
    import struct

    value = struct.unpack("<f", struct.pack("<f", -1.2345678))[0]
    frame = codec.event_codec().encode(
        events.Events(0, [events.Tokens("r", [1], [events.TokenLogprobs([1], [value], 1)])])
    )
    back = codec.event_codec().decode(frame).events[0].logprobs[0].logprobs[0]
    assert struct.pack("<d", back) == struct.pack("<d", value)


def test_a_frame_of_another_kind_is_refused() -> None:
    frame = codec.event_codec().encode(events.EngineDying(""))
    with pytest.raises(ProtocolError, match="kind"):
        codec.request_codec().decode(frame)


def test_a_frame_of_nothing_is_refused() -> None:
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


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        codec.request_codec().decode(b"\x01" + b"\x91" * 100_000 + b"\xc0")
