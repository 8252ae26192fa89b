"""Random bytes on the wire are decoded or rejected, and fail at most the request that they name."""

import itertools
import os
from collections import Counter, deque

import msgspec
import pytest
from core_fakes import cache_plan, core_config
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from service_fakes import FakeRouter, FakeStop, attribution_of, grammars_of, weights_of
from simulation.worker import SimulatedWorker
from wire_samples import FACTS, MESSAGES, SPEC

from octavo.core_proc import invariants
from octavo.core_proc.collector import IdleCollector
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.transfer.base import NoConnector
from octavo.protocol import codec
from octavo.protocol.control import ControlMessage
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Events, Failed, Finished
from octavo.protocol.ids import pack_ids
from octavo.protocol.malformed import MAX_REQUEST_ID_BYTES, Malformed, parse_malformed
from octavo.protocol.requests import Submit
from octavo.protocol.supervise import Child

CODECS = [codec.request_codec(), codec.event_codec(), codec.worker_command_codec(), codec.worker_reply_codec()]
FRAMES = [frames[0] for codec_, message in MESSAGES if len(frames := codec_.encode(message)) == 1]
CLIENT = b"client"
NUM_BLOCKS = 32


@st.composite
def mutated(draw: st.DrawFn, frame: bytes) -> bytes:
    """Change, insert, leave out or cut off some bytes of a frame."""
    data = bytearray(frame)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 4)))
        data[start:end] = draw(st.binary(max_size=4))
    return bytes(data[: draw(st.none() | st.integers(0, len(data)))])


@settings(max_examples=examples(100, 300))
@given(frame=st.binary(max_size=300) | st.sampled_from(FRAMES).flatmap(mutated))
@example(frame=b"\x01" + b"\xdd\xff\xff\xff\xff" * 50)
@example(frame=b"\x02" + b"\x91" * 100_000)
@example(frame=b"\x03\xc6\xff\xff\xff\xff")
def test_a_frame_is_read_or_rejected(frame: bytes) -> None:
    for one in CODECS:
        try:
            message = one.decode(frame)
        except ProtocolError:
            continue
        assert one.decode(*one.encode(message)) == message or b"\x7f\xf8" in frame or b"\xff\xf8" in frame


@settings(max_examples=examples(100, 300))
@given(frame=st.binary(max_size=60) | st.sampled_from(FRAMES[:5]).flatmap(mutated))
def test_the_fault_of_a_malformed_frame_can_be_sent_back(frame: bytes) -> None:
    told = parse_malformed(frame, "fault")
    if told.request_id is not None:
        assert len(told.request_id.encode()) <= MAX_REQUEST_ID_BYTES
    assert told.call_id is None or 0 <= told.call_id < 2**64


@given(request_id=st.text(max_size=300), num_cut=st.integers(1, 20))
def test_a_submission_cut_anywhere_behind_its_name_still_tells_it(request_id: str, num_cut: int) -> None:
    (frame,) = codec.request_codec().encode(Submit(request_id, pack_ids([1, 2]), SPEC))
    assert parse_malformed(frame[:-num_cut], "cut") == Malformed("cut", request_id=request_id)


@pytest.mark.parametrize("call_id", [0, 127, 128, 255, 256, 65536, 2**32, 2**64 - 1])
def test_a_malformed_call_tells_its_number(call_id: int) -> None:
    frame = b"\x01" + msgspec.msgpack.encode(["call", call_id, ["unheard_of"]])
    assert parse_malformed(frame, "odd") == Malformed("odd", call_id=call_id)


def test_the_name_of_a_malformed_submission_may_be_too_long() -> None:
    frame = b"\x01" + msgspec.msgpack.encode(["submit", "x" * (MAX_REQUEST_ID_BYTES + 1), None])
    assert parse_malformed(frame, "odd") == Malformed("odd")


class Core:
    """A core without sockets: what `StepLoop` does, around a worker without a model."""

    def __init__(self) -> None:
        config = core_config(max_num_queued_reqs=16)
        self.ends: Counter[str] = Counter()
        self.router, self.worker = FakeRouter(), SimulatedWorker(config, NUM_BLOCKS)
        self.router.send = self._sent  # type: ignore[method-assign]
        clock = itertools.count(1.0).__next__
        self.scheduler = Scheduler(config, cache_plan(config, NUM_BLOCKS), clock)
        outbox = Outbox(self.router, epoch=1, clock=clock)
        self.service = FrontendService(
            self.router,
            outbox,
            self.scheduler,
            grammars_of(self.scheduler),
            None,
            attribution_of(self.scheduler),
            FACTS,
            FakeStop(),
            clock,
            collector=IdleCollector(),
            weights=weights_of(self.scheduler),
            connector=NoConnector(),
        )
        outbox.connect(CLIENT)

    def _sent(self, peer: bytes, event: object) -> bool:
        ends = [part for part in event.events if isinstance(part, Finished | Failed)] if type(event) is Events else []
        self.ends.update(part.request_id for part in ends)
        return True

    def receive(self, messages: list) -> None:
        """Take in messages and work until nothing is left."""
        self.router.inbox = [(CLIENT, message) for message in messages]
        self.service.serve()
        results = deque()
        while self.scheduler.has_requests or results:
            plan = self.scheduler.plan()
            if plan is not None:
                invariants.check_plan(self.scheduler, plan)
                results.append(self.worker.execute(plan))
            self.service.deliver(self.scheduler.commit(results.popleft()))
            invariants.check(self.scheduler)


SUBMISSIONS = [
    codec.request_codec().encode(Submit(name, pack_ids(prompt), spec, stream_interval=interval))[0]
    for name, prompt, spec, interval in (
        ("r", [1, 2, 3], SPEC, 1),
        ("s", list(range(40)), msgspec.structs.replace(SPEC, max_tokens=20, logprobs=2, min_tokens=3), 7),
        ("t", [4] * 9, msgspec.structs.replace(SPEC, prompt_logprobs=1, skip_reading_prefix_cache=True), 2),
    )
]


@settings(max_examples=examples(100, 300))
@given(frames=st.lists(st.sampled_from(SUBMISSIONS).flatmap(mutated), min_size=1, max_size=6))
def test_no_submission_breaks_the_core(frames: list[bytes]) -> None:
    core, requests = Core(), codec.request_codec()
    messages: list[object] = []
    for frame in frames:
        try:
            messages.append(requests.decode(frame))
        except ProtocolError as error:
            messages.append(parse_malformed(frame, str(error)))
    named = Counter(str(message.request_id) for message in messages if getattr(message, "request_id", None) is not None)
    core.receive(messages)
    # Of messages with the name of a live request, those that cannot be read have no answer of their own.
    assert core.ends.keys() == named.keys()
    assert all(core.ends[name] <= named[name] for name in named)
    core.receive([Submit("after", pack_ids([1, 2, 3]), msgspec.structs.replace(SPEC, max_tokens=4))])
    assert core.ends["after"] >= 1
    assert core.scheduler.cache.pool.num_free == NUM_BLOCKS


@settings(max_examples=examples(80, 200))
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=3))
@example(data=b"\x02\x00\x00\x00\xc1\xc1", cuts=[])
@example(data=b"\xff\xff\xff\xff" + b"x" * 20, cuts=[2])
def test_no_status_message_breaks_the_parent(data: bytes, cuts: list[int]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    child = Child("fuzz", None, reader)  # type: ignore[arg-type]
    try:
        for start, end in itertools.pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
            os.write(writer, data[start:end])
            child._read()
        assert all(isinstance(message, ControlMessage) for message in child._messages)
    finally:
        os.close(reader)
        os.close(writer)
