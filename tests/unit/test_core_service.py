"""The core's service without sockets and workers: intake, aborts, draining."""

import logging
from typing import NoReturn

import pytest
from core_fakes import CLIENT, cache_plan, core_config
from service_fakes import FakeRouter, FakeStop, attribution_of, grammars_of

from octavo.core_proc.grammar.compiler import GrammarCompiler, grammar_key
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.request_map import RequestMap
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import MAX_ABORTS_AT_ONCE, FrontendService
from octavo.protocol.events import Events, Failed, Finished, Reply
from octavo.protocol.malformed import Malformed
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Abort, Call, GetSnapshot, ModelVocabulary, Submit
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.structured import GrammarKind, GrammarSpec


@pytest.mark.parametrize("is_lost", [False, True], ids=["aborted", "lost"])
def test_a_drain_ends_with_the_last_request_however_that_ends(is_lost: bool):
    config = core_config()
    router, stop, now = FakeRouter(), FakeStop(), [0.0]
    outbox = Outbox(router, epoch=1, clock=lambda: now[0])
    scheduler = Scheduler(config, cache_plan(config), clock=lambda: now[0])
    service = FrontendService(
        router, outbox, scheduler, grammars_of(scheduler), None, attribution_of(scheduler), None, stop, lambda: now[0]
    )
    outbox.connect(CLIENT)
    router.inbox = [(CLIENT, Submit("r", [1, 2], SamplingSpec(max_tokens=4, seed=0)))]
    service.serve()
    stop.count = 1
    service.serve()
    assert service.is_open, "a request is left to finish"
    if is_lost:
        router.is_peer_gone = True
        now[0] = 2.0  # the statistics that are due find nobody
    else:
        router.inbox = [(CLIENT, Abort(["r"]))]
    service.serve()
    assert not scheduler.has_requests
    assert not service.is_open, "nothing will ever wake the core again"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_drain_waits_for_a_dropped_frontend_to_reconnect(is_told: bool):
    config = core_config()
    router, stop, now = FakeRouter(), FakeStop(), [0.0]
    outbox = Outbox(router, epoch=1, clock=lambda: now[0], max_backlog_events=1)
    scheduler = Scheduler(config, cache_plan(config), clock=lambda: now[0])
    service = FrontendService(
        router, outbox, scheduler, grammars_of(scheduler), None, attribution_of(scheduler), None, stop, lambda: now[0]
    )
    outbox.connect(CLIENT)
    router.is_peer_slow = True
    names = ["r", "s"]
    submissions = [(CLIENT, Submit(name, [1, 2], SamplingSpec(max_tokens=4, seed=0))) for name in names]
    router.inbox = [*submissions, (CLIENT, Abort(names))]
    stop.count = 1
    service.serve()
    assert outbox.has_dropped and service.is_open
    now[0] = 1.0
    router.is_peer_slow = not is_told
    service.serve(has_messages=False)
    now[0] = 2.5
    service.serve(has_messages=False)
    assert service.is_open == is_told, "who was told may come back for two seconds, who reads nothing is not waited for"
    assert not is_told or 0 < service.timeout_s < 1
    now[0] = 3.5
    service.serve(has_messages=False)
    assert not service.is_open


@pytest.mark.parametrize("reads_again", [True, False])
def test_a_drain_waits_for_a_slow_frontend_to_read_the_end_of_its_requests(reads_again: bool):
    """What the simulation found first: the core ended, and kept what it owed."""
    config = core_config()
    router, stop, now = FakeRouter(), FakeStop(), [0.0]
    outbox = Outbox(router, epoch=1, clock=lambda: now[0])
    scheduler = Scheduler(config, cache_plan(config), clock=lambda: now[0])
    service = FrontendService(
        router, outbox, scheduler, grammars_of(scheduler), None, attribution_of(scheduler), None, stop, lambda: now[0]
    )
    outbox.connect(CLIENT)
    router.is_peer_slow = True
    router.inbox = [(CLIENT, Submit("r", [1, 2], SamplingSpec(max_tokens=4, seed=0))), (CLIENT, Abort(["r"]))]
    stop.count = 1
    service.serve()
    now[0] = 1.0
    service.serve(has_messages=False)
    assert service.is_open and 0 < service.timeout_s < 1, "it tries again, and does not spin meanwhile"
    router.is_peer_slow = not reads_again
    now[0] = 1.5 if reads_again else 2.5
    service.serve(has_messages=False)
    assert not service.is_open
    ended = [event for message in router.sent if isinstance(message, Events) for event in message.events]
    assert len(ended) == reads_again


@pytest.mark.parametrize("is_gone", [False, True], ids=["there", "gone"])
def test_last_requests_of_a_frontend_that_has_left_are_no_news(is_gone: bool, caplog: pytest.LogCaptureFixture):
    config = core_config()
    router = FakeRouter()
    outbox = Outbox(router, epoch=1, clock=lambda: 0.0)
    scheduler = Scheduler(config, cache_plan(config), clock=lambda: 0.0)
    service = FrontendService(
        router,
        outbox,
        scheduler,
        grammars_of(scheduler),
        None,
        attribution_of(scheduler),
        None,
        FakeStop(),
        lambda: 0.0,
    )
    router.is_peer_gone = is_gone
    router.inbox = [(CLIENT, Abort(["r"]))]
    with caplog.at_level(logging.WARNING):
        service.serve()
    assert ("must be Connect" in caplog.text) == (not is_gone)


def test_the_dashboard_counts_requests_that_wait_for_their_grammars(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GrammarCompiler, "start", lambda self, spec, client: grammar_key(spec))
    config = core_config()
    router = FakeRouter()
    outbox = Outbox(router, epoch=1, clock=lambda: 0.0)
    scheduler = Scheduler(config, cache_plan(config), clock=lambda: 0.0)
    service = FrontendService(
        router,
        outbox,
        scheduler,
        grammars_of(scheduler),
        None,
        attribution_of(scheduler),
        None,
        FakeStop(),
        lambda: 0.0,
    )
    outbox.connect(CLIENT)
    spec = GrammarSpec(GrammarKind.REGEX, "a")
    submit = Submit("r", [1, 2], SamplingSpec(max_tokens=4, seed=0), grammar=spec)
    messages = [ModelVocabulary([b"a"] * config.model.vocab_size, []), submit, Call(1, GetSnapshot())]
    router.inbox = [(CLIENT, message) for message in messages]
    service.serve()
    (shown,) = [event.result for event in router.sent if isinstance(event, Reply)]
    assert isinstance(shown, EngineSnapshot)
    assert shown.stats.num_waiting == shown.stats.num_deferred == 1


class Front:
    """A service over a scheduler that computes nothing, and a frontend that reads."""

    def __init__(self) -> None:
        config = core_config()
        self.router, self.now = FakeRouter(), 0.0
        outbox = Outbox(self.router, epoch=1, clock=lambda: self.now)
        self.scheduler = Scheduler(config, cache_plan(config), clock=lambda: self.now)
        self.service = FrontendService(
            self.router,
            outbox,
            self.scheduler,
            grammars_of(self.scheduler),
            None,
            attribution_of(self.scheduler),
            None,
            FakeStop(),
            lambda: self.now,
        )
        outbox.connect(CLIENT)

    def turn(self, *messages: object) -> list[object]:
        """Let these messages arrive, and return the events that come of the turn."""
        self.router.inbox = [(CLIENT, message) for message in messages]
        self.router.sent.clear()
        self.service.serve()
        return [event for message in self.router.sent if isinstance(message, Events) for event in message.events]


def submissions(count: int) -> list[Submit]:
    return [Submit(str(index), [1, 2], SamplingSpec(max_tokens=4, seed=0)) for index in range(count)]


MANY = 2 * MAX_ABORTS_AT_ONCE + 1


@pytest.mark.parametrize("is_lost", [False, True], ids=["aborted", "lost"])
def test_many_aborts_are_spread_over_turns(is_lost: bool):
    front = Front()
    front.turn(*submissions(MANY))
    front.router.is_peer_gone = is_lost
    front.now = 2.0  # the statistics that are due find nobody, if it is gone
    events = front.turn() if is_lost else front.turn(Abort([str(index) for index in range(MANY)]))
    num_left = [len(front.scheduler.requests)]
    while front.scheduler.has_requests:
        assert front.service.timeout_s == 0.0, "nothing else would wake the core"
        events += front.turn()
        num_left.append(len(front.scheduler.requests))
    assert num_left == [MANY - MAX_ABORTS_AT_ONCE, MANY - 2 * MAX_ABORTS_AT_ONCE, 0]
    front.turn()
    assert front.service.timeout_s is None, "nothing is left to do"
    if not is_lost:
        assert sorted(event.request_id for event in events) == sorted(str(index) for index in range(MANY))


def test_the_name_of_a_request_whose_abort_is_pending_can_be_used_again():
    front = Front()
    front.turn(*submissions(MANY))
    again = Submit(str(MANY - 1), [3, 4, 5], SamplingSpec(max_tokens=4, seed=0))
    events = front.turn(Abort([str(index) for index in range(MANY)]), again)
    assert Finished in {type(event) for event in events if event.request_id == again.request_id}
    assert not any(isinstance(event, Failed) for event in events)
    while len(front.scheduler.requests) > 1:
        front.turn()
    assert front.scheduler.requests[CLIENT, again.request_id].num_prompt_tokens == 3
    front.turn()
    assert front.scheduler.has_requests, "the abort was of the request before"


def test_what_does_not_concern_all_requests_does_not_list_them(monkeypatch: pytest.MonkeyPatch):
    front = Front()
    front.turn(*submissions(3))

    def list_all(table: RequestMap) -> NoReturn:
        raise AssertionError("all requests are listed")

    for name in ("__iter__", "values", "items"):
        monkeypatch.setattr(RequestMap, name, list_all)
    (failed,) = front.turn(Malformed("is no number", request_id="new"))
    assert isinstance(failed, Failed) and failed.request_id == "new"
    assert front.turn(Malformed("is no number", request_id="1")) == [], "the live request of that name was read"
    assert [event.request_id for event in front.turn(Abort(["1", "unknown"]))] == ["1"]
    front.router.is_peer_gone = True
    front.now = 2.0
    front.turn()
    assert len(front.scheduler.requests) == 0
