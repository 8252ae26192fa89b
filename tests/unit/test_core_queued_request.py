"""Requests that wait: their packed form, its size, and the maps that hold them."""

import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from core_fakes import CLIENT, FakeEngine, cache_plan, core_config
from hypothesis import given
from hypothesis import strategies as st

from octavo.core_proc.queued_request import QueuedRequest, make_request
from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.recovery.crash_journal import CrashJournal
from octavo.core_proc.recovery.quarantine import Quarantine
from octavo.core_proc.request import Request
from octavo.core_proc.request_map import RequestKey, RequestMap
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.codec import request_codec
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.pulse import PulseWriter
from octavo.protocol.requests import Submit
from octavo.protocol.structured import GrammarKind, GrammarSpec

NUM_REQUESTS = 3000
PROMPT_LENGTH = 100
MAX_BYTES_PER_TOKEN = 8

samplings = st.builds(
    SamplingSpec,
    max_tokens=st.integers(1, 2**64 - 1),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, -0.0, 1.0]),
    top_k=st.sampled_from([0, 1]),
    presence_penalty=st.sampled_from([0.0, -0.0]),
    stop_token_ids=st.sampled_from([(), (7,), tuple(range(5000))]),
    logprobs=st.sampled_from([None, 0, 1]),
    logit_bias=st.sampled_from([(), ((1, -0.0),), ((1, 0.0),)]),
    extra_args=st.sampled_from([None, {}, {"a": 1}, {"a": True}, {"a": 1.0}]),
)
submissions = st.builds(
    Submit,
    request_id=st.text(max_size=3),
    prompt_token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(pack_ids),
    params=samplings,
    priority=st.integers(-2, 2),
    cache_salt=st.sampled_from([None, "", "a"]),
    resume_output_token_ids=st.sampled_from([(), (), (5,)]).map(pack_ids),
    stream_interval=st.integers(1, 2),
    grammar=st.sampled_from([None, None, GrammarSpec(GrammarKind.REGEX, "a")]),
)


def attributes(request: Request) -> dict[str, object]:
    values = {name: getattr(request, name) for name in Request.__slots__ if hasattr(request, name)}
    return {**values, "sampling": msgspec.msgpack.encode(request.sampling)}  # exact: 0.0 == -0.0


@given(submits=st.lists(submissions, max_size=6), now=st.floats(0, allow_infinity=False))
def test_an_unpacked_request_equals_one_that_was_never_packed(submits: list[Submit], now: float) -> None:
    for order, submit in enumerate(submits):
        made, expected = make_request(CLIENT, submit, order, now), Request(CLIENT, submit, order, now)
        if isinstance(made, QueuedRequest):
            for name in ("client", "request_id", "order", "key", "state", "needs_step_input", "time_queued"):
                assert getattr(made, name) == getattr(expected, name)
            for name in (
                "num_prompt_tokens",
                "num_known_outputs",
                "num_computed_tokens",
                "num_in_flight",
                "max_tokens",
            ):
                assert getattr(made, name) == getattr(expected, name)
            for name in ("num_pending_tokens", "num_cached_tokens", "num_preemptions", "time_scheduled", "block_ids"):
                assert getattr(made, name) == getattr(expected, name)
            assert made.time_first_token == expected.time_first_token
            made = made.unpack()
        else:
            assert submit.grammar is not None or submit.resume_output_token_ids
        assert attributes(made) == attributes(expected)


def test_a_waiting_token_takes_at_most_eight_bytes(tmp_path: Path) -> None:
    config = core_config(max_model_len=8192)
    scheduler = Scheduler(config, cache_plan(config, 4096), time.monotonic)
    pulse = PulseWriter(tmp_path / "pulse")
    journal = CrashJournal(tmp_path, pulse)
    quarantine = Quarantine(CrashAttribution(scheduler, journal), scheduler.submit, scheduler.requests.__contains__, 0)
    codec = request_codec()
    sampling = SamplingSpec(max_tokens=1, seed=0, temperature=0.7, top_p=0.9, eos_token_ids=(2,))
    messages = []
    for index in range(NUM_REQUESTS):
        own = msgspec.structs.replace(sampling, max_tokens=1000 + index, seed=2**63 + index)
        messages.append(codec.encode(Submit(f"01234567:{index}", pack_ids([index % 50] * PROMPT_LENGTH), own)))
    tracemalloc.start(1)
    before, _ = tracemalloc.get_traced_memory()
    for frames in messages:
        submit = codec.decode(*frames)
        assert isinstance(submit, Submit)
        assert not quarantine.submit(CLIENT, submit)
    del submit
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(scheduler.waiting) == NUM_REQUESTS
    assert (after - before) / (NUM_REQUESTS * PROMPT_LENGTH) < MAX_BYTES_PER_TOKEN
    journal.close()
    pulse.close()


@pytest.mark.parametrize("is_isolating", [False, True])
def test_only_the_first_requests_of_the_queue_are_unpacked(is_isolating: bool) -> None:
    engine = FakeEngine(max_num_seqs=2, async_scheduling=False)
    for index in range(8):
        engine.submit(str(index), [1, 2, 3, index], max_tokens=2)
    if is_isolating:
        engine.scheduler.restrict(frozenset((CLIENT, str(index)) for index in (5, 6, 7)))
    engine.turn()
    assert [request.request_id for request in engine.scheduler.running] == (["5", "6"] if is_isolating else ["0", "1"])
    unpacked = [request.request_id for request in engine.scheduler.waiting if isinstance(request, Request)]
    assert unpacked == (["7"] if is_isolating else ["2"])
    engine.scheduler.restrict(None)
    engine.run()


keys = st.tuples(st.sampled_from([b"a", b"b"]), st.sampled_from(["x", "y", "z"]))


@given(st.lists(st.tuples(keys, st.none() | st.integers())))
def test_a_request_map_is_a_mapping(changes: list[tuple[RequestKey, int | None]]) -> None:
    requests, expected = RequestMap[int](), dict[RequestKey, int]()
    for key, value in changes:
        if value is None:
            assert requests.pop(key) == expected.pop(key, None)
        else:
            requests[key] = expected[key] = value
        assert requests.get(key) == expected.get(key) and (key in requests) == (key in expected)
    assert dict(requests.items()) == expected and len(requests) == len(expected)
    assert set(requests) == set(expected) and sorted(requests.values()) == sorted(expected.values())
    assert set(requests.clients) == {client for client, _ in expected}
    for client in (b"a", b"b"):
        assert list(requests.ids_of(client)) == [request_id for owner, request_id in expected if owner == client]
    for key in expected:
        assert requests[key] == expected[key]
    with pytest.raises(KeyError):
        requests[b"c", "x"]
