"""The core's service without sockets and workers: intake, aborts, draining."""

import logging
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import pytest
from core_fakes import CLIENT, cache_plan, core_config
from service_fakes import FakeRouter, FakeStop, attribution_of, grammars_of, weights_of

from octavo.core_proc.collector import IdleCollector
from octavo.core_proc.grammar.compiler import GrammarCompiler, grammar_key
from octavo.core_proc.outbox import MAX_BACKLOG_EVENTS, Outbox
from octavo.core_proc.pending_aborts import MAX_ABORTS_AT_ONCE
from octavo.core_proc.request_map import RequestMap
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.transfer.base import NoConnector, RequestConnector
from octavo.protocol.admin import DrainEngine, SetLogLevel
from octavo.protocol.events import Events, Failed, Finished, FinishReason, Reply
from octavo.protocol.malformed import Malformed
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Abort, Call, GetSnapshot, ModelVocabulary, Submit
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.structured import GrammarKind, GrammarSpec

NO_CONNECTOR = NoConnector()


class Front:
    """A service over a scheduler that computes nothing, and a frontend that reads.

    Args:
        is_connected: whether the frontend has introduced itself.
        max_backlog_events: a frontend with a larger backlog is dropped.
        connector: that requests wait for.
    """

    def __init__(
        self,
        *,
        is_connected: bool = True,
        max_backlog_events: int = MAX_BACKLOG_EVENTS,
        connector: RequestConnector = NO_CONNECTOR,
    ) -> None:
        self.config = core_config()
        self.router, self.stop, self.now = FakeRouter(), FakeStop(), 0.0
        self.outbox = Outbox(self.router, 1, lambda: self.now, max_backlog_events)
        self.scheduler = Scheduler(self.config, cache_plan(self.config), clock=lambda: self.now)
        self.service = FrontendService(
            self.router,
            self.outbox,
            self.scheduler,
            grammars_of(self.scheduler),
            None,
            attribution_of(self.scheduler),
            None,
            self.stop,
            lambda: self.now,
            collector=IdleCollector(),
            weights=weights_of(self.scheduler),
            connector=connector,
        )
        if is_connected:
            self.outbox.connect(CLIENT)

    def turn(self, *messages: object) -> list[object]:
        """Let these messages arrive, and return the events that come of the turn."""
        self.router.inbox = [(CLIENT, message) for message in messages]
        self.router.sent.clear()
        self.service.serve()
        return [event for message in self.router.sent if isinstance(message, Events) for event in message.events]

    def wait_until(self, now: float) -> list[object]:
        """Run a turn without messages at this time."""
        self.now = now
        return self.turn()


def submission(request_id: str) -> Submit:
    return Submit(request_id, [1, 2], SamplingSpec(max_tokens=4, seed=0))


@pytest.mark.parametrize("is_lost", [False, True], ids=["aborted", "lost"])
def test_a_drain_ends_with_the_last_request_however_that_ends(is_lost: bool):
    front = Front()
    front.turn(submission("r"))
    front.stop.count = 1
    front.turn()
    assert front.service.is_open, "a request is left to finish"
    front.router.is_peer_gone = is_lost
    if is_lost:
        front.wait_until(2.0)  # the statistics that are due find nobody
    else:
        front.turn(Abort(["r"]))
    assert not front.scheduler.has_requests
    assert not front.service.is_open, "nothing will ever wake the core again"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_drain_waits_for_a_dropped_frontend_to_reconnect(is_told: bool):
    front = Front(max_backlog_events=1)
    front.router.is_peer_slow = True
    front.stop.count = 1
    front.turn(submission("r"), submission("s"), Abort(["r", "s"]))
    assert front.outbox.has_dropped and front.service.is_open
    front.router.is_peer_slow = not is_told
    front.wait_until(1.0)
    front.wait_until(2.5)
    assert front.service.is_open == is_told, "a frontend that was told has two seconds; one that reads nothing has none"
    assert not is_told or 0 < front.service.timeout_s < 1
    front.wait_until(3.5)
    assert not front.service.is_open


@pytest.mark.parametrize("reads_again", [True, False])
def test_a_drain_waits_for_a_slow_frontend_to_read_the_end_of_its_requests(reads_again: bool):
    """What the simulation found first: the core ended with events that it had not sent."""
    front = Front()
    front.router.is_peer_slow = True
    front.stop.count = 1
    front.turn(submission("r"), Abort(["r"]))
    front.wait_until(1.0)
    assert front.service.is_open and 0 < front.service.timeout_s < 1, "it tries again, and does not spin meanwhile"
    front.router.is_peer_slow = not reads_again
    ended = front.wait_until(1.5 if reads_again else 2.5)
    assert not front.service.is_open
    assert len(ended) == reads_again


@pytest.mark.parametrize("is_gone", [False, True], ids=["there", "gone"])
def test_last_requests_of_a_frontend_that_has_left_are_not_logged(is_gone: bool, caplog: pytest.LogCaptureFixture):
    front = Front(is_connected=False)
    front.router.is_peer_gone = is_gone
    with caplog.at_level(logging.WARNING):
        front.turn(Abort(["r"]))
    assert ("must be Connect" in caplog.text) == (not is_gone)


def test_the_dashboard_counts_requests_that_wait_for_their_grammars(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GrammarCompiler, "start", lambda self, spec, client: grammar_key(spec))
    front = Front()
    submit = msgspec.structs.replace(submission("r"), grammar=GrammarSpec(GrammarKind.REGEX, "a"))
    front.turn(ModelVocabulary([b"a"] * front.config.model.vocab_size, []), submit, Call(1, GetSnapshot()))
    (shown,) = [event.result for event in front.router.sent if isinstance(event, Reply)]
    assert isinstance(shown, EngineSnapshot)
    assert shown.stats.num_waiting == shown.stats.num_deferred == 1


def submissions(count: int) -> list[Submit]:
    return [submission(str(index)) for index in range(count)]


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


def test_a_message_about_one_request_does_not_list_all_requests(monkeypatch: pytest.MonkeyPatch):
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


class FakeConnector:
    """Holds the requests whose ids begin with "held"."""

    def __init__(self) -> None:
        self.held: dict[tuple[bytes, str], Submit] = {}
        self.ended: list[str] = []

    @property
    def num_waiting(self) -> int:
        return len(self.held)

    def is_waiting(self, key: tuple[bytes, str]) -> bool:
        return key in self.held

    def submit(self, client: bytes, submit: Submit) -> Submit | list[ClientEvent]:
        if not submit.request_id.startswith("held"):
            return submit
        self.held[client, submit.request_id] = submit
        return []

    def abort(self, client: bytes, request_ids: Sequence[str]) -> list[ClientEvent]:
        ended = [each for each in request_ids if self.held.pop((client, each), None)]
        return [(client, Finished(each, FinishReason.ABORT)) for each in ended]

    def take_ready(self) -> list[tuple[bytes, Submit]]:
        return []

    def note_ended(self, request_ids: Sequence[str]) -> None:
        self.ended += request_ids

    def close(self) -> None:
        pass


def test_a_connector_learns_once_of_every_request_that_ends():
    connector = FakeConnector()
    front = Front(connector=connector)
    front.turn(submission("failed"), submission("held"), submission("aborted"))
    (rejected,) = front.turn(submission("held"))
    assert "is in use" in rejected.message and connector.ended == [], "the first one of this id lives"
    front.turn(Abort(["held", "aborted", "unknown"]))
    assert sorted(connector.ended) == ["aborted", "held"]
    front.service.deliver(front.scheduler.fail(front.scheduler.requests[CLIENT, "failed"], "no weights"))
    assert connector.ended[2:] == ["failed"]


def test_the_log_says_that_requests_wait_for_the_connector(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "octavo")
    front = Front(connector=FakeConnector())
    front.turn(submission("held"))
    front.wait_until(20.0)
    assert "1 requests wait for the KV connector" in caplog.text


def test_a_draining_engine_says_how_to_end_that():
    front = Front()
    front.turn(Call(1, DrainEngine(True)))
    (failed,) = front.turn(submission("late"))
    assert failed.message == (
        "the engine drains (octavo admin drain) until octavo admin resume, and takes no new requests"
    )


def test_a_higher_log_level_leaves_a_trace(caplog: pytest.LogCaptureFixture):
    log = logging.getLogger("octavo")
    level = log.level
    log.setLevel("WARNING")
    try:
        Front().turn(Call(1, SetLogLevel("ERROR")))
        assert log.level == logging.ERROR
    finally:
        log.setLevel(level)
    assert caplog.messages == ["log level changes from WARNING to ERROR (octavo admin log-level)"]
