"""The frontend's link to the core, against a fake core that is a bare ROUTER."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from core_links import EPOCH, SUBMIT, FakeCore, run, take
from waiting import until

from octavo.frontend.link import MAX_FAILED_AT_ONCE, SLICE_SIZE, CoreLink
from octavo.frontend.loop_socket import MAX_RECEIVED_AT_ONCE
from octavo.frontend.request_stream import RequestStream
from octavo.protocol.channel import MAX_FRAME_BYTES
from octavo.protocol.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from octavo.protocol.events import (
    BoolResult,
    CallFailed,
    EngineDying,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Refused,
    Reply,
    StatsReport,
    StreamedTokens,
    Tokens,
)
from octavo.protocol.requests import Abort, Call, ResetPrefixCache
from octavo.protocol.stats import EngineStats


def test_a_request_and_its_events(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        assert await core.receive() == SUBMIT
        await core.events(Tokens("r", [7]), Tokens("other", [9]))
        assert await take(stream, arrived) == [Tokens("r", [7])]
        await core.events(Tokens("r", [8]))
        await core.events(Tokens("r", [9]), Finished("r", FinishReason.STOP))
        await until(lambda: stream.is_over)
        assert await take(stream, arrived) == [
            Tokens("r", [8]),
            Tokens("r", [9]),
            Finished("r", FinishReason.STOP),
        ]
        assert link.num_live_requests == 0

    run(tmp_path, scenario)


def test_events_of_an_older_engine_are_ignored(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.events(Tokens("r", [7]), epoch=EPOCH - 1)
        await core.events(Tokens("r", [8]))
        assert await take(stream, arrived) == [Tokens("r", [8])]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.INVALID, InvalidRequestError),
        (FailureKind.OVERLOADED, OverloadedError),
        (FailureKind.INTERNAL, RequestFailedError),
    ],
)
def test_a_failure_comes_after_the_tokens_before_it(tmp_path: Path, kind: FailureKind, error: type[Exception]) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.events(Tokens("r", [7]), Failed("r", kind, "because"))
        assert await take(stream, arrived) == [Tokens("r", [7])]
        with pytest.raises(error, match="because"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_abort_reaches_the_core_once_and_silences_the_stream(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        link.submit(SUBMIT, arrived)
        await core.receive()
        link.abort(["r", "unknown"])
        link.abort(["r"])
        assert await core.receive() == Abort(["r"])
        await core.events(Tokens("r", [7]))
        await core.send(StatsReport(EngineStats(num_running=3)))
        await until(lambda: link.latest_stats.num_running == 3)
        assert not arrived.is_set()

    run(tmp_path, scenario)


def test_closing_aborts_what_runs(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await link.close()
        assert await core.receive() == Abort(["r"])
        with pytest.raises(EngineDeadError, match="closed"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_closing_twice_at_once(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        link.submit(SUBMIT, asyncio.Event())
        await asyncio.gather(link.close(), link.close(), link.close())
        assert link.failure is not None
        assert link.num_live_requests == 0

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "bad",
    [
        {"priority": 2**70},
        {"priority": 1.5},
        {"cache_salt": "\ud800"},
        {"cache_salt": 5},
        {"prompt_token_ids": [2**64]},
        {"cache_salt": "x" * MAX_FRAME_BYTES},
    ],
    ids=["out of range", "a float", "half a surrogate pair", "a number", "a huge token", "too long a message"],
)
def test_a_request_the_core_cannot_read_fails_alone(tmp_path: Path, bad: dict[str, object]) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        with pytest.raises(InvalidRequestError):
            link.submit(msgspec.structs.replace(SUBMIT, **bad), asyncio.Event())
        assert link.num_live_requests == 0
        link.submit(SUBMIT, asyncio.Event())
        assert await core.receive() == SUBMIT

    run(tmp_path, scenario)


def test_a_loop_that_breaks_ends_every_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        def on_stats(stats: EngineStats) -> None:
            raise ZeroDivisionError("in the caller's code")

        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        link.on_stats = on_stats
        await core.send(StatsReport(EngineStats()))
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_a_core_that_gave_this_frontend_up_ends_every_request(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.send(Refused("connect first"))
        with pytest.raises(EngineDeadError, match="connect first"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_two_live_requests_of_one_id_are_rejected(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        link.submit(SUBMIT, asyncio.Event())
        with pytest.raises(InvalidRequestError, match="in use"):
            link.submit(SUBMIT, asyncio.Event())

    run(tmp_path, scenario)


def test_utility_calls(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        for result in (BoolResult(True), EngineStats(num_steps=4)):
            calling = asyncio.create_task(link.call(ResetPrefixCache()))
            call = await core.receive()
            assert isinstance(call, Call)
            await core.send(Reply(call.call_id, result))
            assert await calling == result
        calling = asyncio.create_task(link.call(ResetPrefixCache()))
        call = await core.receive()
        await core.send(Reply(call.call_id, CallFailed("no such thing")))
        with pytest.raises(RequestFailedError, match="no such thing"):
            await calling
        with pytest.raises(RequestFailedError, match="did not answer"):
            await link.call(ResetPrefixCache(), timeout_s=0.05)

    run(tmp_path, scenario)


def test_a_core_that_vanishes_ends_every_request(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        calling = asyncio.create_task(link.call(ResetPrefixCache()))
        await core.receive()
        core.socket.close(linger=0)
        with pytest.raises(EngineDeadError, match="gone"):
            await take(stream, arrived)
        with pytest.raises(EngineDeadError):
            await calling
        with pytest.raises(EngineDeadError):
            link.submit(SUBMIT, arrived)

    run(tmp_path, scenario)


def test_a_dying_core_names_the_cause(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.send(EngineDying("worker 0 was killed by SIGKILL"))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await take(stream, arrived)

    run(tmp_path, scenario)


NAMES = [str(number) for number in range(3 * max(MAX_FAILED_AT_ONCE, SLICE_SIZE * MAX_RECEIVED_AT_ONCE))]


def submit_all(link: CoreLink) -> list[RequestStream]:
    return [link.submit(msgspec.structs.replace(SUBMIT, request_id=name), asyncio.Event()) for name in NAMES]


async def counted_per_turn(count: Callable[[], int]) -> list[int]:
    """Return how much is added in each iteration of the event loop until there is one for each name."""
    counts = [count()]
    async with asyncio.timeout(10):
        while counts[-1] < len(NAMES):
            await asyncio.sleep(0)
            counts.append(count())
    return [after - before for before, after in pairwise(counts)]


def test_a_long_message_is_delivered_in_several_turns_and_in_order(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        streams = submit_all(link)
        for _ in streams:
            await core.receive()
        await core.events(StreamedTokens(NAMES, list(range(len(NAMES))), [0] * len(NAMES)))
        await core.events(*[Finished(name, FinishReason.STOP) for name in reversed(NAMES)])
        added = await counted_per_turn(lambda: sum(stream.is_over for stream in streams))
        assert max(added) <= SLICE_SIZE * MAX_RECEIVED_AT_ONCE
        for number, stream in enumerate(streams):
            tokens, finished = stream.take()
            assert tokens.token_ids == [number] and isinstance(finished, Finished)
        assert link.num_live_requests == 0

    run(tmp_path, scenario)


@pytest.mark.parametrize("is_closed", [False, True])
def test_many_requests_fail_in_several_turns(tmp_path: Path, is_closed: bool) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        streams = submit_all(link)
        if is_closed:
            closing = asyncio.create_task(link.close())
        else:
            link.fail("it broke")
        added = await counted_per_turn(lambda: sum(stream.is_over for stream in streams))
        assert max(added) <= MAX_FAILED_AT_ONCE
        for stream in streams:
            with pytest.raises(EngineDeadError):
                stream.take()
        with pytest.raises(EngineDeadError):
            link.submit(SUBMIT, asyncio.Event())
        assert (link.num_live_requests, link.num_lost_requests) == (0, len(NAMES))
        if is_closed:
            await closing
            requests = [await core.receive() for _ in range(len(NAMES) + 1)]
            assert requests[-1] == Abort(NAMES)

    run(tmp_path, scenario)
