"""What the core's front desk does without a socket or a worker: here, how it comes to an end."""

import logging

import pytest
from core_fakes import CLIENT, cache_plan, core_config
from service_fakes import FakeRouter, FakeStop, blame_of, grammars_of

from octavo.core_proc.grammar.compiler import GrammarCompiler, grammar_key
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.protocol.events import Events, Reply
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Abort, Call, GetSnapshot, Submit, Vocabulary
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.structured import GrammarKind, GrammarSpec


@pytest.mark.parametrize("is_lost", [False, True], ids=["aborted", "lost"])
def test_a_drain_ends_with_the_last_request_however_that_ends(is_lost: bool):
    config = core_config()
    router, stop, now = FakeRouter(), FakeStop(), [0.0]
    outbox = Outbox(router, epoch=1, clock=lambda: now[0])
    scheduler = Scheduler(config, cache_plan(config), clock=lambda: now[0])
    service = FrontendService(
        router, outbox, scheduler, grammars_of(scheduler), None, blame_of(scheduler), None, stop, lambda: now[0]
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
def test_a_drain_waits_a_while_for_the_return_of_a_frontend_that_it_gave_up(is_told: bool):
    config = core_config()
    router, stop, now = FakeRouter(), FakeStop(), [0.0]
    outbox = Outbox(router, epoch=1, clock=lambda: now[0], max_backlog_events=1)
    scheduler = Scheduler(config, cache_plan(config), clock=lambda: now[0])
    service = FrontendService(
        router, outbox, scheduler, grammars_of(scheduler), None, blame_of(scheduler), None, stop, lambda: now[0]
    )
    outbox.connect(CLIENT)
    router.is_peer_slow = True
    names = ["r", "s"]
    submissions = [(CLIENT, Submit(name, [1, 2], SamplingSpec(max_tokens=4, seed=0))) for name in names]
    router.inbox = [*submissions, (CLIENT, Abort(names))]
    stop.count = 1
    service.serve()
    assert outbox.has_given_up and service.is_open
    now[0] = 1.0
    router.is_peer_slow = not is_told
    service.serve(has_mail=False)
    now[0] = 2.5
    service.serve(has_mail=False)
    assert service.is_open == is_told, "who was told may come back for two seconds, who reads nothing is not waited for"
    assert not is_told or 0 < service.timeout_s < 1
    now[0] = 3.5
    service.serve(has_mail=False)
    assert not service.is_open


@pytest.mark.parametrize("reads_again", [True, False])
def test_a_drain_waits_a_while_for_a_frontend_that_has_not_read_how_its_requests_ended(reads_again: bool):
    """What the simulation found first: the core ended, and kept what it owed."""
    config = core_config()
    router, stop, now = FakeRouter(), FakeStop(), [0.0]
    outbox = Outbox(router, epoch=1, clock=lambda: now[0])
    scheduler = Scheduler(config, cache_plan(config), clock=lambda: now[0])
    service = FrontendService(
        router, outbox, scheduler, grammars_of(scheduler), None, blame_of(scheduler), None, stop, lambda: now[0]
    )
    outbox.connect(CLIENT)
    router.is_peer_slow = True
    router.inbox = [(CLIENT, Submit("r", [1, 2], SamplingSpec(max_tokens=4, seed=0))), (CLIENT, Abort(["r"]))]
    stop.count = 1
    service.serve()
    now[0] = 1.0
    service.serve(has_mail=False)
    assert service.is_open and 0 < service.timeout_s < 1, "it tries again, and does not spin meanwhile"
    router.is_peer_slow = not reads_again
    now[0] = 1.5 if reads_again else 2.5
    service.serve(has_mail=False)
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
        router, outbox, scheduler, grammars_of(scheduler), None, blame_of(scheduler), None, FakeStop(), lambda: 0.0
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
        router, outbox, scheduler, grammars_of(scheduler), None, blame_of(scheduler), None, FakeStop(), lambda: 0.0
    )
    outbox.connect(CLIENT)
    spec = GrammarSpec(GrammarKind.REGEX, "a")
    submit = Submit("r", [1, 2], SamplingSpec(max_tokens=4, seed=0), grammar=spec)
    messages = [Vocabulary([b"a"] * config.model.vocab_size, []), submit, Call(1, GetSnapshot())]
    router.inbox = [(CLIENT, message) for message in messages]
    service.serve()
    (shown,) = [event.result for event in router.sent if isinstance(event, Reply)]
    assert isinstance(shown, EngineSnapshot)
    assert shown.stats.num_waiting == shown.stats.num_deferred == 1
