"""Which requests move when an engine dies or leaves, and how several engines look like one."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_client import resolved_config

from octavo.frontend import engine_connection
from octavo.frontend.recovery.in_flight import InFlightRequest, InFlightRequests
from octavo.frontend.recovery.replacement import require_same_bits, require_same_model
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.routed_link import RoutedLink
from octavo.frontend.routing.router import PrefixRouter
from octavo.frontend.spawn import addresses_of_engines, configs_of_engines
from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import ConfigError, EngineDeadError, InvalidRequestError, NotEnoughMemoryError
from octavo.protocol.events import CacheUpdate, Tokens
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import GetStats, Submit
from octavo.protocol.stats import EngineStats, total

BLOCK_SIZE = 16


def submission(name: str) -> Submit:
    return Submit(name, pack_ids([1, 2, 3]), SamplingSpec(max_tokens=4, seed=0))


def test_requests_of_a_dead_engine_continue_elsewhere() -> None:
    dead, other = InFlightRequests(), InFlightRequests()
    dead.add(submission("a"), is_sent=True, num_new_tokens=3)
    dead.add(submission("b"), is_sent=True, num_new_tokens=3)
    assert dead.num_pending_tokens == 6
    dead.deliver(Tokens("a", [7], num_cached_tokens=0))
    assert dead.num_pending_tokens == 3, "a has been computed"
    dead.lose_core()
    dead.add(submission("c"), is_sent=False, num_new_tokens=3)
    moved = dead.release(9)
    assert len(dead) == dead.num_pending_tokens == dead.num_new == 0
    submits = [other.adopt(entry, num_new_tokens=2) for entry in moved]
    assert [submit.request_id for submit in submits] == ["a", "b", "c"]
    assert submits[0].resume_output_token_ids == pack_ids([7])
    assert [submit.is_continued for submit in submits] == [True, True, False]
    assert other.num_pending_tokens == 4, "a has its first token already"
    finished = other.deliver(Tokens("a", [8], num_cached_tokens=5))
    assert finished == Tokens("a", [8], num_cached_tokens=0), "as reported with the first tokens"


def test_a_request_that_was_on_two_dead_engines_stays_with_the_second() -> None:
    """It may be what kills them: the next core of that engine finds out by isolation, and no third engine dies."""
    first, second = InFlightRequests(), InFlightRequests()
    first.add(submission("poison"), is_sent=True)
    first.lose_core()
    (entry,) = first.release(9)
    assert second.adopt(entry, 0) is not None
    second.add(submission("innocent"), is_sent=True)
    second.lose_core()
    assert [entry.submit.request_id for entry in second.release(9)] == ["innocent"]
    (again,) = second.take_unsent(9)
    assert again.request_id == "poison" and again.is_continued


def test_a_request_that_moved_by_request_is_no_suspect_when_its_next_engine_dies() -> None:
    first, second, third = InFlightRequests(), InFlightRequests(), InFlightRequests()
    first.add(submission("a"), is_sent=True)
    first.deliver(Tokens("a", [7], num_cached_tokens=0))
    (entry,) = first.release(9, after_crash=False)
    submit = second.adopt(entry, 0)
    assert submit is not None and submit.resume_output_token_ids == pack_ids([7]) and submit.is_continued
    second.lose_core()
    (entry,) = second.release(9)
    assert third.adopt(entry, 0) is not None
    third.lose_core()
    assert not third.release(9), "two engines died with it"


def test_each_engine_records_in_a_file_of_its_own() -> None:
    config = resolved_config(data_parallel_size=3, record_steps="/tmp/steps")
    configs = configs_of_engines(config)
    assert [one.engine_index for one in configs] == [one.engine_place for one in configs] == [0, 1, 2]
    assert [one.record_steps for one in configs] == ["/tmp/steps", "/tmp/steps.engine1", "/tmp/steps.engine2"]


@pytest.mark.parametrize(("num_engines", "message"), [(1, "worker 1: no"), (2, "engine 1: worker 1: no")])
def test_a_failed_start_names_the_engine_of_several(
    num_engines: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(spawned: Any, on_progress: object) -> None:
        if spawned.config.engine_index == num_engines - 1:
            raise NotEnoughMemoryError("worker 1: no", phase="loading weights", hint="buy some")
        await asyncio.Event().wait()

    monkeypatch.setattr(engine_connection, "follow_engine", follow)
    configs = configs_of_engines(resolved_config(data_parallel_size=num_engines))
    spawned = [SimpleNamespace(config=config) for config in configs]
    with pytest.raises(NotEnoughMemoryError) as raised:
        asyncio.run(engine_connection.follow_engines(cast(Any, spawned), None))
    assert (raised.value.message, raised.value.hint, raised.value.phase) == (message, "buy some", "loading weights")


def test_each_engine_has_an_address_of_its_own() -> None:
    assert addresses_of_engines("tcp://0.0.0.0:5555", 2) == ["tcp://0.0.0.0:5555", "tcp://0.0.0.0:5556"]
    assert addresses_of_engines("ipc:///run/x", 3) == ["ipc:///run/x", "ipc:///run/x.1", "ipc:///run/x.2"]
    assert addresses_of_engines("tcp://127.0.0.1:*", 1) == ["tcp://127.0.0.1:*"]
    with pytest.raises(ConfigError, match="names no port"):
        addresses_of_engines("tcp://127.0.0.1:*", 2)


def test_engines_that_compute_other_bits_are_not_joined() -> None:
    require_same_bits({"ipc:///a": "x", "ipc:///b": "x"})
    with pytest.raises(ConfigError, match=r"ipc:///b does not compute the same bits as that at ipc:///a"):
        require_same_bits({"ipc:///a": "x", "ipc:///b": "y"})


def test_engines_of_different_models_are_not_joined() -> None:
    one = resolved_config(dtype="float32")
    require_same_model({"ipc:///a": one, "ipc:///b": one})
    with pytest.raises(ConfigError, match=r"the engine at ipc:///b serves .* in bfloat16, and that at ipc:///a .*"):
        require_same_model({"ipc:///a": one, "ipc:///b": resolved_config(dtype="bfloat16")})


def test_reports_of_engines_are_added_up() -> None:
    one = EngineStats(num_running=1, num_blocks=10, num_free_blocks=5, worker_failures={"hung": 1})
    other = EngineStats(num_running=2, num_blocks=10, waiting_reason="blocks", worker_failures={"hung": 1, "exited": 2})
    summed = total([one, other])
    assert (summed.num_running, summed.num_blocks, summed.kv_cache_usage) == (3, 20, 0.75)
    assert summed.worker_failures == {"hung": 2, "exited": 2}
    assert summed.waiting_reason == "blocks"


class FakeLink:
    """An engine that keeps requests and computes none."""

    load = (0, 0)

    def __init__(self, *names: str, identity: str = "a") -> None:
        self.facts = SimpleNamespace(identity=identity, max_model_len=9, block_size=BLOCK_SIZE)
        self.names = list(names)
        self.failed: list[str] = []
        self.num_watches = 0
        self.failure: EngineDeadError | None = None
        self.is_up = False
        self.downtime = None
        self.answer: EngineStats | None = None
        """To every call; None: it never comes."""
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
        return RequestStream(submit.request_id, cast(Any, arrived))

    def __contains__(self, name: str) -> bool:
        return name in self.names

    async def call(self, utility: GetStats, timeout_s: float) -> EngineStats:
        if self.answer is None:
            await asyncio.Event().wait()
        assert self.answer is not None
        return self.answer

    def die(self) -> None:
        self.is_up = False
        self.on_lost()

    def fail(self) -> None:
        self.failure = EngineDeadError("it is gone for good")
        if not self.on_lost():
            self.fail_rest()

    def fail_rest(self) -> None:
        self.failed += self.names
        self.names = []

    def come_back(self) -> None:
        self.is_up = True
        self.on_up()

    def watch_cache(self, on_cache_update: Callable[[CacheUpdate], None]) -> None:
        self.num_watches += 1
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
        links[1].on_cache_update(CacheUpdate(1, 1, sequence, sequence == 0, 0, Buffer(b""), Buffer(b"")))
    assert [link.num_watches for link in links] == [1, 2]


def test_one_engine_reports_nothing_until_another_one_joins() -> None:
    links = FakeLink(), FakeLink(), FakeLink()
    routed = routed_over(links[0])
    assert links[0].num_watches == 0
    routed.add(1, cast(Any, links[1]))
    routed.add(2, cast(Any, links[2]))
    assert [link.num_watches for link in links] == [1, 1, 1]


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


def send(routed: RoutedLink, name: str, identity: str, beside: str | None = None) -> None:
    routed.submit(submission(name), cast(Any, None), identity, beside)


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
            send(routed, f"next {index}", "a", beside="first")
        assert sorted(len(link.names) for link in links) == [0, 0, 6]

    asyncio.run(main())
