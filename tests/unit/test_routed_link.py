"""Several links that look like one: where requests go, and which move when an engine dies or leaves."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.frontend.recovery.in_flight import InFlightRequest
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.routed_link import RoutedLink
from octavo.frontend.routing.router import PrefixRouter
from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import EngineDeadError, InvalidRequestError
from octavo.protocol.events import CacheUpdate
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import GetStats, Submit
from octavo.protocol.stats import EngineStats

BLOCK_SIZE = 16


def submission(name: str) -> Submit:
    return Submit(name, pack_ids([1, 2, 3]), SamplingSpec(max_tokens=4, seed=0))


class FakeLink:
    """An engine that keeps requests and computes none."""

    load = (0, 0)

    def __init__(self, *names: str, identity: str = "a") -> None:
        self.facts = SimpleNamespace(identity=identity, max_model_len=9, block_size=BLOCK_SIZE)
        self.names = list(names)
        self.failed: list[str] = []
        self.num_watches = 0
        self.failure: EngineDeadError | None = None
        self.num_looks = 0
        """How often somebody asked whether it is up."""
        self.is_up = False
        self.downtime = None
        self.link_of: dict[str, FakeLink] = {}
        self.answer: EngineStats | None = None
        """To every call; None: it never comes."""
        self.on_cache_update: Callable[[CacheUpdate], None] | None = None
        self.on_down: Callable[[], None]
        self.on_lost: Callable[[], bool]
        self.on_up: Callable[[], None]

    def release(self, max_count: int) -> list[tuple[InFlightRequest, str]]:
        names, self.names = self.names, []
        return [(InFlightRequest(submission(name)), name) for name in names]

    def adopt(self, entry: InFlightRequest, stream: str, num_new_tokens: int) -> None:
        self.names.append(stream)

    @property
    def num_live_requests(self) -> int:
        return len(self.names)

    def submit(self, submit: Submit, arrived: object, num_new_tokens: int = 0) -> RequestStream:
        self.names.append(submit.request_id)
        self.link_of[submit.request_id] = self
        return RequestStream(submit.request_id, cast(Any, arrived))

    def abort(self, names: list[str]) -> None:
        for name in names:
            self.names.remove(name)
            del self.link_of[name]

    @property
    def is_up(self) -> bool:
        self.num_looks += 1
        return self._is_up

    @is_up.setter
    def is_up(self, is_up: bool) -> None:
        self._is_up = is_up

    async def call(self, utility: GetStats, timeout_s: float) -> EngineStats:
        if self.answer is None:
            await asyncio.Event().wait()
        assert self.answer is not None
        return self.answer

    def die(self) -> None:
        self.is_up = False
        self.on_down()
        self.on_lost()

    def fail(self) -> None:
        self.failure = EngineDeadError("it is gone for good")
        self.on_down()
        if not self.on_lost():
            self.fail_rest()

    def fail_rest(self) -> None:
        self.failed += self.names
        self.names = []

    def come_back(self) -> None:
        self.is_up = True
        self.on_up()

    def watch_cache(self, on_cache_update: Callable[[CacheUpdate], None] | None) -> None:
        self.num_watches += on_cache_update is not None
        self.on_cache_update = on_cache_update

    async def close(self) -> None:
        """Nothing is open."""


def routed_over(*links: FakeLink, serving: Sequence[int] | None = None) -> RoutedLink:
    """Return a link over fake ones; all of them serve unless told otherwise."""
    routed = RoutedLink(PrefixRouter(8, 1000, BLOCK_SIZE))
    for index, link in enumerate(links):
        routed.add(index, cast(Any, link))
    routed.serve(range(len(links)) if serving is None else serving)
    return routed


def test_a_lost_report_is_asked_for_again() -> None:
    links = FakeLink(), FakeLink()
    routed_over(*links)
    for sequence in (0, 2):
        assert links[1].on_cache_update is not None
        links[1].on_cache_update(CacheUpdate(1, 1, sequence, sequence == 0, 0, Buffer(b""), Buffer(b"")))
    assert [link.num_watches for link in links] == [1, 2]


def test_one_engine_reports_nothing_until_another_one_joins() -> None:
    links = FakeLink(), FakeLink(), FakeLink()
    routed = routed_over(links[0])
    assert links[0].num_watches == 0
    routed.add(1, cast(Any, links[1]))
    routed.add(2, cast(Any, links[2]))
    assert [link.num_watches for link in links] == [1, 1, 1]
    routed.remove(1)
    assert links[0].on_cache_update is not None
    routed.remove(2)
    assert links[0].on_cache_update is None, "it is alone again"


def test_requests_of_an_engine_that_is_gone_wait_for_one_that_restarts() -> None:
    async def main() -> None:
        gone, restarting = FakeLink("a"), FakeLink("b")
        routed = routed_over(gone, restarting)
        gone.fail()
        assert (gone.names, gone.failed, routed.failure) == (["a"], [], None)
        restarting.come_back()
        assert (gone.names, restarting.names) == ([], ["b", "a"])

    asyncio.run(main())


def test_requests_fail_once_no_engine_comes_back() -> None:
    async def main() -> None:
        first, last = FakeLink("a"), FakeLink("b")
        routed = routed_over(first, last)
        first.fail()
        last.fail()
        assert routed.failure
        assert (first.failed, last.failed) == (["a"], ["b"])
        waiting, other = FakeLink("a"), FakeLink()
        routed = routed_over(waiting, other)
        waiting.fail()
        await routed.close()
        assert waiting.failed == ["a"] and not other.failed

    asyncio.run(main())


def test_requests_do_not_wait_for_an_engine_that_is_removed() -> None:
    async def main() -> None:
        gone, restarting, other = FakeLink("a"), FakeLink(), FakeLink(identity="b")
        routed = routed_over(gone, restarting, other)
        other.come_back()
        routed.serve([2])
        gone.fail()
        assert (gone.names, gone.failed) == (["a"], [])
        routed.remove(1)
        assert gone.failed == ["a"]

    asyncio.run(main())


def test_an_engine_that_comes_back_with_other_weights_says_why_it_gets_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        links = FakeLink(), FakeLink()
        routed = routed_over(*links)
        links[0].come_back()
        links[1].facts.identity = "b"
        links[1].come_back()
        send(routed, "x", "a")
        assert (links[0].names, links[1].names) == (["x"], [])

    asyncio.run(main())
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "engine 1 is back with other weights" in line


def send(routed: RoutedLink, name: str, identity: str, sibling: str | None = None) -> None:
    routed.submit(submission(name), cast(Any, None), identity, sibling)


def test_an_engine_that_drains_gets_nothing_new_and_its_requests_move_when_told() -> None:
    async def main() -> None:
        draining, serving = links = FakeLink("a"), FakeLink()
        routed = routed_over(*links)
        for link in links:
            link.come_back()
        routed.serve([1])
        send(routed, "b", "a")
        assert (draining.names, serving.names) == (["a"], ["b"])
        routed.move_away(0)
        assert (draining.names, serving.names) == ([], ["b", "a"])
        routed.remove(0)
        send(routed, "c", "a")
        assert serving.names == ["b", "a", "c"]

    asyncio.run(main())


def test_requests_never_move_to_other_weights() -> None:
    async def main() -> None:
        old, second, new = links = FakeLink("a"), FakeLink(), FakeLink(identity="b")
        changes: list[str] = []
        routed = routed_over(*links, serving=[0, 1])
        routed._on_model_changed = lambda: changes.append(routed.identity)
        for link in links:
            link.come_back()
        routed.serve([2])
        assert changes == ["b"]
        routed.move_away(0)
        assert second.names == ["a"], "the other engine of these weights drains too, but has not left"
        second.die()
        assert (old.names, second.names) == (["a"], []), "better with an engine that leaves than nowhere"
        send(routed, "late", "a")
        send(routed, "fresh", "b")
        assert (old.names, new.names) == (["a", "late"], ["fresh"])
        second.fail()
        old.fail()
        assert (old.failed, new.names) == (["a", "late"], ["fresh"])

    asyncio.run(main())


def test_an_id_is_in_use_on_all_engines() -> None:
    """Requests of the same id would overwrite one another when one of them moves."""
    first, second = FakeLink(), FakeLink()
    first.is_up = second.is_up = True
    routed = routed_over(first, second)
    routed.submit(submission("a"), cast(Any, None), "a")
    assert first.names == ["a"]
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        routed.submit(submission("a"), cast(Any, None), "a")
    assert second.names == []


def test_a_call_does_not_wait_for_an_engine_that_dies() -> None:
    async def main() -> None:
        living, dying = FakeLink(), FakeLink()
        routed = routed_over(living, dying)
        for link in (living, dying):
            link.come_back()
        living.answer = EngineStats(num_running=1)
        calling = asyncio.create_task(routed.call(GetStats()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        dying.die()
        stats = await calling
        assert isinstance(stats, EngineStats) and stats.num_running == 1

    asyncio.run(main())


def test_sequences_of_one_prompt_go_to_one_engine() -> None:
    async def main() -> None:
        links = FakeLink(), FakeLink(), FakeLink()
        routed = routed_over(*links)
        for link in links:
            link.come_back()
        send(routed, "first", "a")
        for index in range(5):
            send(routed, f"next {index}", "a", sibling="first")
        assert sorted(len(link.names) for link in links) == [0, 0, 6]

    asyncio.run(main())


def test_a_request_takes_no_look_at_every_engine() -> None:
    """With 64 engines, looking at each would take longer than the choice."""

    async def main() -> None:
        links = [FakeLink() for _ in range(64)]
        routed = RoutedLink(PrefixRouter(64, 1000, BLOCK_SIZE))
        for index, link in enumerate(links):
            routed.add(index, cast(Any, link))
        routed.serve(range(64))
        for link in links:
            link.come_back()
        send(routed, "first", "a")
        num_looks = sum(link.num_looks for link in links)
        for number in range(10):
            send(routed, str(number), "a")
        assert sum(link.num_looks for link in links) == num_looks
        assert sum(len(link.names) for link in links) == 11
        routed.abort(["first", "5", "unknown"])
        assert [len(link.names) for link in links[:8]] == [0, 1, 1, 1, 1, 1, 0, 1]
        links[11].die()
        send(routed, "last", "a")
        assert links[12].names == ["last"], "the change is noticed"

    asyncio.run(main())
