"""A link whose core is replaced, against fake cores that are bare ROUTERs at one address."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from bare_cores import FACTS, Cores, run
from waiting import until

from octavo.frontend.link import SLICE_SIZE, CoreLink
from octavo.frontend.loop_socket import MAX_RECEIVED_AT_ONCE
from octavo.frontend.recovery.downtime import ReconnectPolicy, Resumption
from octavo.frontend.request_stream import RequestStream
from octavo.protocol.errors import EngineDeadError, OverloadedError, RequestFailedError
from octavo.protocol.events import (
    BoolResult,
    EngineDying,
    Finished,
    FinishReason,
    Refused,
    Reply,
    StatsReport,
    Tokens,
    Welcome,
)
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import (
    Abort,
    Call,
    Connect,
    GetStats,
    ModelVocabulary,
    StartProfile,
    Submit,
)
from octavo.protocol.stats import EngineStats

SUBMIT = Submit("r", pack_ids([1, 2]), SamplingSpec(max_tokens=4, seed=0))


async def take(stream: RequestStream, arrived: asyncio.Event) -> list:
    await asyncio.wait_for(arrived.wait(), 10)
    arrived.clear()
    return stream.take()


async def replace(cores: Cores, link: CoreLink, *, is_planned: bool = False) -> None:
    """Kill the core, see that it is noticed, and start another."""
    cores.die()
    await until(lambda: link.downtime)
    cores.start()
    await cores.welcome(cores.epoch - 1 if is_planned else 0)


def test_a_resubmitted_request_continues_after_its_delivered_tokens(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        resumptions: list[Resumption] = []
        link.on_resumed = resumptions.append
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        assert await cores.receive() == SUBMIT
        await cores.events(Tokens("r", [7, 8], num_cached_tokens=1))
        assert await take(stream, arrived) == [Tokens("r", [7, 8], num_cached_tokens=1)]
        await replace(cores, link)
        again = msgspec.structs.replace(SUBMIT, resume_output_token_ids=pack_ids([7, 8]), is_continued=True)
        assert await cores.receive() == again
        await cores.events(Tokens("r", [6]), epoch=cores.epoch - 1)
        await cores.events(Tokens("r", [9]), Finished("r", FinishReason.STOP))
        assert await take(stream, arrived) == [
            Tokens("r", [9], num_cached_tokens=1),
            Finished("r", FinishReason.STOP, num_cached_tokens=1, num_preemptions=1),
        ]
        assert link.facts.epoch == cores.epoch
        (resumption,) = resumptions
        assert resumption.num_requests == 1
        assert resumption.pause_s > 0

    run(tmp_path, scenario)


def test_a_new_core_is_not_as_busy_as_the_last_one_was(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        reports: list[EngineStats] = []
        link.on_stats = reports.append
        await cores.send(StatsReport(EngineStats(num_running=7)))
        await until(lambda: link.load == (0, 7))
        await replace(cores, link)
        await until(lambda: link.is_up)
        assert link.load == (0, 0)
        assert [report.num_running for report in reports] == [7, 0], "gauges do not stay as they were"

    run(tmp_path, scenario)


def test_requests_submitted_during_the_downtime_wait(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        link.submit(SUBMIT, asyncio.Event())
        link.submit(msgspec.structs.replace(SUBMIT, request_id="gone"), asyncio.Event())
        link.send_vocabulary(ModelVocabulary([b"a"], []))
        for _ in range(3):
            await cores.receive()
        cores.die()
        await until(lambda: link.downtime)
        late = msgspec.structs.replace(SUBMIT, request_id="late")
        link.submit(late, asyncio.Event())
        link.abort(["gone"])
        calling = asyncio.create_task(link.call(GetStats()))
        cores.start()
        await cores.welcome()
        assert await cores.receive() == ModelVocabulary([b"a"], [])
        assert isinstance(await cores.receive(), Call)
        assert await cores.receive() == msgspec.structs.replace(SUBMIT, is_continued=True)
        assert await cores.receive() == late
        link.abort(["r"])
        assert await cores.receive() == Abort(["r"])
        calling.cancel()

    run(tmp_path, scenario)


def test_calls_in_flight(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        profiling = asyncio.create_task(link.call(StartProfile("/tmp")))
        calling = asyncio.create_task(link.call(GetStats()))
        for _ in range(2):
            await cores.receive()
        await replace(cores, link)
        call = await cores.receive()
        assert isinstance(call, Call) and isinstance(call.utility, GetStats)
        await cores.send(Reply(call.call_id, BoolResult(True)))
        assert await calling == BoolResult(True)
        with pytest.raises(RequestFailedError, match="died meanwhile"):
            await profiling

    run(tmp_path, scenario)


def test_the_last_message_of_a_core_names_the_cause(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        link.submit(SUBMIT, asyncio.Event())
        await cores.receive()
        await cores.send(EngineDying("a bug in the scheduler"))
        await until(lambda: link.downtime)
        assert link.downtime.cause == "a bug in the scheduler"
        await replace(cores, link)
        assert isinstance(await cores.receive(), Submit)

    run(tmp_path, scenario)


def test_an_orderly_end_is_no_outage(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await cores.receive()
        await cores.send(EngineDying(""))
        with pytest.raises(EngineDeadError, match="shut down"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_the_reconnect_limit_ends_with_the_root_cause(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await cores.receive()
        await cores.send(EngineDying("the disk is on fire"))
        cores.die()
        with pytest.raises(EngineDeadError, match=r"the disk is on fire.*none came back"):
            await take(stream, arrived)
        with pytest.raises(EngineDeadError):
            link.submit(SUBMIT, arrived)

    run(tmp_path, scenario, ReconnectPolicy(0.5))


def test_only_so_many_new_requests_are_held(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        link.submit(SUBMIT, asyncio.Event())
        await cores.receive()
        cores.die()
        await until(lambda: link.downtime)
        for name in ("a", "b"):
            link.submit(msgspec.structs.replace(SUBMIT, request_id=name), asyncio.Event())
        with pytest.raises(OverloadedError, match="restarted"):
            link.submit(msgspec.structs.replace(SUBMIT, request_id="c"), asyncio.Event())
        link.abort(["a"])
        link.submit(msgspec.structs.replace(SUBMIT, request_id="d"), asyncio.Event())

    run(tmp_path, scenario, ReconnectPolicy(None, max_num_waiting=2))


def test_a_link_reconnects_until_a_core_stays(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        link.submit(SUBMIT, asyncio.Event())
        await cores.receive()
        for _ in range(3):
            cores.die()
            await asyncio.sleep(0.3)
            cores.start()
            assert isinstance(await cores.receive(), Connect)
        await cores.send(Welcome(msgspec.structs.replace(FACTS, epoch=cores.epoch)))
        assert isinstance(await cores.receive(), Submit)

    run(tmp_path, scenario)


def test_another_engine_at_the_address_is_asked_ever_more_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delays: list[float] = []

    async def scenario(cores: Cores, link: CoreLink) -> None:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def call_now(delay_s: float, callback: Callable[..., None], *args: object) -> asyncio.TimerHandle:
            if callback == link._reopen_wire:
                delays.append(delay_s)
                delay_s = 0.0
            return call_later(delay_s, callback, *args)

        loop.call_later = call_now  # type: ignore[assignment]
        link.accepts = lambda facts: len(delays) == 7
        await replace(cores, link)
        for _ in range(7):
            await cores.welcome()
        await until(lambda: link.is_up)

    run(tmp_path, scenario)
    assert delays == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    (line,) = [record.getMessage() for record in caplog.records if "another engine" in record.getMessage()]
    assert "waiting there for engine 0" in line


def test_requests_end_if_the_next_core_has_another_protocol_version(tmp_path: Path) -> None:
    async def scenario(cores: Cores, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await cores.receive()
        cores.die()
        await until(lambda: link.downtime)
        cores.start()
        await cores.receive()
        await cores.send(Refused("this engine speaks version 9"))
        with pytest.raises(EngineDeadError, match="version 9"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_a_dropped_frontend_reconnects(tmp_path: Path) -> None:
    """A core forgets a frontend that does not read, such as one that was stopped; nothing of its requests is lost."""

    async def scenario(cores: Cores, link: CoreLink) -> None:
        arrived = asyncio.Event()
        resumptions: list[Resumption] = []
        link.on_resumed = resumptions.append
        stream = link.submit(SUBMIT, arrived)
        await cores.receive()
        await cores.events(Tokens("r", [7]))
        await take(stream, arrived)
        await cores.send(Refused("the first message of a connection must be Connect"))
        await cores.welcome()
        again = await cores.receive()
        assert isinstance(again, Submit) and again.resume_output_token_ids == pack_ids([7])
        assert not resumptions, "the engine was not restarted"

    run(tmp_path, scenario)


def test_a_planned_restart_makes_no_request_a_suspect(tmp_path: Path) -> None:
    """A frontend that has only joined sees the end of its core before it can know that this was planned."""

    async def scenario(cores: Cores, link: CoreLink) -> None:
        resumptions: list[Resumption] = []
        link.on_resumed = resumptions.append
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        for _ in range(4):
            await cores.receive()
            await replace(cores, link, is_planned=True)
        await cores.receive()
        await cores.events(Tokens("r", [7]))
        assert await take(stream, arrived) == [Tokens("r", [7])]
        assert [resumption.kind for resumption in resumptions] == ["planned"] * 4

    run(tmp_path, scenario)


def test_everything_is_asked_again_of_each_core(tmp_path: Path) -> None:
    """Who is to blame is the core's business: it alone knows the requests of all frontends."""

    async def scenario(cores: Cores, link: CoreLink) -> None:
        streams = {name: asyncio.Event() for name in "abc"}
        for name, arrived in streams.items():
            link.submit(msgspec.structs.replace(SUBMIT, request_id=name), arrived)
        for _ in range(3):
            for _ in range(3):
                await cores.receive()
            await replace(cores, link)
        again = [await cores.receive() for _ in range(3)]
        assert all(isinstance(submit, Submit) and submit.is_continued for submit in again)
        assert [submit.request_id for submit in again if isinstance(submit, Submit)] == ["a", "b", "c"]
        assert len(set(cores.frontend_ids)) == 1, "it has the same name in all its connections"

    run(tmp_path, scenario)


def test_many_requests_are_sent_again_in_slices_and_in_order(tmp_path: Path) -> None:
    """Meanwhile one is added, some are aborted, and the core is lost again."""
    names = [str(number) for number in range(5 * SLICE_SIZE * MAX_RECEIVED_AT_ONCE)]

    def submit(link: CoreLink, name: str) -> None:
        link.submit(msgspec.structs.replace(SUBMIT, request_id=name), asyncio.Event())

    async def scenario(cores: Cores, link: CoreLink) -> None:
        num_unsent_turns = 0

        def lose_again(resumption: Resumption) -> None:
            asyncio.get_running_loop().call_soon(link.lose, "lost again")
            link.on_resumed = change

        def change(resumption: Resumption) -> None:
            submit(link, "late")
            link.abort([names[-1], names[-2]])
            count()

        def count() -> None:
            nonlocal num_unsent_turns
            if link._in_flight.has_unsent:
                num_unsent_turns += 1
                asyncio.get_running_loop().call_soon(count)

        for name in names:
            submit(link, name)
        for _ in names:
            await cores.receive()
        link.on_resumed = lose_again
        await replace(cores, link)
        await until(lambda: link.downtime)
        cores.epoch += 1
        while not isinstance(await cores.receive(), Connect):  # the first slices
            pass
        await cores.send(Welcome(msgspec.structs.replace(FACTS, epoch=cores.epoch)))
        for name in [*names[:-2], "late"]:
            again = await cores.receive()
            assert isinstance(again, Submit) and again.request_id == name
        assert num_unsent_turns >= 5
        link.abort(["late"])
        assert await cores.receive() == Abort(["late"])

    run(tmp_path, scenario)
