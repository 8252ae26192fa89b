"""Events for frontends that are slow or gone."""

import pytest

from octavo.core_proc.outbox import Backlog, Outbox
from octavo.protocol.channel import PeerLost
from octavo.protocol.events import (
    BoolResult,
    Event,
    Events,
    Finished,
    FinishReason,
    Refused,
    Reply,
    StatsReport,
    StreamedTokens,
    TokenLogprobs,
    Tokens,
)
from octavo.protocol.stats import EngineStats


class FakeRouter:
    """Sends to whoever is neither slow nor gone."""

    def __init__(self) -> None:
        self.slow: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.sent: list[tuple[bytes, Event]] = []

    def send(self, peer: bytes, event: Event) -> bool:
        if peer in self.gone:
            raise PeerLost("gone")
        if peer not in self.slow:
            self.sent.append((peer, event))
        return peer not in self.slow


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def outbox(router: FakeRouter) -> Outbox:
    outbox = Outbox(router, epoch=3, clock=lambda: 9.0)
    outbox.connect(b"a")
    outbox.connect(b"b")
    return outbox


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-1.0], 1)


def test_the_events_of_a_step_are_grouped_by_frontend(outbox: Outbox, router: FakeRouter):
    end = Finished("1", FinishReason.STOP)
    outbox.put([(b"a", Tokens("1", [1])), (b"b", Tokens("2", [2])), (b"a", end), (b"stranger", end)])
    assert router.sent == [
        (b"a", Events(3, [Tokens("1", [1]), end], 9.0)),
        (b"b", Events(3, [Tokens("2", [2])], 9.0)),
    ]


def test_events_for_a_slow_frontend_are_kept_and_merged(outbox: Outbox, router: FakeRouter):
    router.slow = {b"a"}
    outbox.put([(b"a", Tokens("1", [1], [logprob(1)], [None], 5))])
    outbox.put([(b"a", Tokens("2", [7]))])
    outbox.put([(b"a", Tokens("1", [2], [logprob(2)])), (b"b", Tokens("3", [4]))])
    outbox.put([(b"a", Finished("1", FinishReason.STOP))])
    assert outbox.has_backlog
    assert [peer for peer, _ in router.sent] == [b"b"]
    router.slow = set()
    outbox.flush()
    assert not outbox.has_backlog
    assert router.sent[-1][1].events == [
        Tokens("1", [1, 2], [logprob(1), logprob(2)], [None], 5),
        Tokens("2", [7]),
        Finished("1", FinishReason.STOP),
    ]


def test_streamed_tokens_are_sent_as_they_are_and_kept_by_request(outbox: Outbox, router: FakeRouter):
    first, second = StreamedTokens(["1", "2"], [7, 8], [0, 16]), StreamedTokens(["2", "1"], [9, 10], [16, 0])
    outbox.put([(b"a", first)])
    assert router.sent.pop() == (b"a", Events(3, [first], 9.0))
    router.slow = {b"a"}
    outbox.put([(b"a", first)])
    outbox.put([(b"a", second)])
    router.slow = set()
    outbox.flush()
    assert router.sent[-1][1].events == [Tokens("1", [7, 10]), Tokens("2", [8, 9], num_cached_tokens=16)]


def test_tokens_of_a_later_request_of_the_same_name_are_not_merged(outbox: Outbox, router: FakeRouter):
    router.slow = {b"a"}
    first, end, second = Tokens("1", [1]), Finished("1", FinishReason.STOP), Tokens("1", [2])
    outbox.put([(b"a", first), (b"a", end), (b"a", second)])
    router.slow = set()
    outbox.flush()
    assert router.sent[-1][1].events == [first, end, second]


def test_a_lost_frontend_is_reported_once(outbox: Outbox, router: FakeRouter):
    router.gone = {b"a"}
    outbox.put([(b"a", Tokens("1", [1]))])
    outbox.put([(b"a", Tokens("1", [2]))])
    assert outbox.take_lost() == [b"a"]
    assert outbox.take_lost() == []
    assert not outbox.is_connected(b"a")


def test_a_broadcast_detects_lost_frontends(outbox: Outbox, router: FakeRouter):
    router.gone = {b"b"}
    outbox.broadcast(StatsReport(EngineStats()))
    assert outbox.take_lost() == [b"b"]
    assert [peer for peer, _ in router.sent] == [b"a"]


def test_a_frontend_that_never_reads_is_dropped_and_told_when_it_reads(router: FakeRouter):
    outbox = Outbox(router, epoch=1, clock=lambda: 0.0, max_backlog_events=10)
    outbox.connect(b"a")
    router.slow = {b"a"}
    for index in range(11):
        outbox.put([(b"a", Finished(str(index), FinishReason.STOP))])
    assert outbox.take_lost() == [b"a"]
    assert not outbox.has_backlog
    assert outbox.has_dropped, "else it would wait for ever for what never comes"
    router.slow = set()
    outbox.flush()
    assert isinstance(router.sent[-1][1], Refused)
    assert not outbox.has_dropped


def test_a_dropped_frontend_may_be_gone(router: FakeRouter):
    outbox = Outbox(router, epoch=1, clock=lambda: 0.0, max_backlog_events=1)
    outbox.connect(b"a")
    router.slow = {b"a"}
    for index in range(2):
        outbox.put([(b"a", Finished(str(index), FinishReason.STOP))])
    router.gone = {b"a"}
    outbox.flush()
    assert not outbox.has_dropped
    assert outbox.take_lost() == [b"a"], "it is lost once"


def test_a_reply_waits_for_a_slow_frontend(outbox: Outbox, router: FakeRouter):
    router.slow = {b"a"}
    outbox.reply(b"a", Reply(1, BoolResult(True)))
    outbox.reply(b"stranger", Reply(1, BoolResult(True)))
    assert (router.sent, outbox.has_backlog) == ([], True)
    router.slow = set()
    outbox.flush()
    assert router.sent == [(b"a", Reply(1, BoolResult(True)))]
    assert not outbox.has_backlog


def test_events_of_a_frontend_that_reads_are_sent_as_they_are(
    outbox: Outbox, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Backlog, "extend", lambda self, events: pytest.fail("merged, though it was sent"))
    tokens = [Tokens(str(index), [index]) for index in range(3)]
    outbox.put([(b"a", event) for event in tokens])
    ((_, sent),) = router.sent
    assert all(event is other for event, other in zip(sent.events, tokens, strict=True))
    assert not outbox.has_backlog
