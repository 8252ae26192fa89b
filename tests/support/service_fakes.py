"""Fakes around the core's service for tests without sockets and processes."""

from simulation.crash_journal import SimulatedCrashJournal

from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.weights.control import WeightsControl
from octavo.core_proc.weights.state import WeightsState
from octavo.protocol.channel import PeerLost
from octavo.protocol.events import Event
from octavo.protocol.requests import FrontendMessage
from octavo.protocol.weights import WeightsRecord


class FakeRouter:
    """Delivers the messages in `inbox`. Its one frontend may be gone or not read."""

    def __init__(self) -> None:
        self.malformed_frames = 0
        self.inbox: list[tuple[bytes, FrontendMessage]] = []
        self.is_peer_gone = False
        self.is_peer_slow = False
        self.sent: list[Event] = []

    def receive(self) -> list[tuple[bytes, FrontendMessage]]:
        received, self.inbox = self.inbox, []
        return received

    def send(self, peer: bytes, event: Event) -> bool:
        if self.is_peer_gone:
            raise PeerLost("gone")
        if not self.is_peer_slow:
            self.sent.append(event)
        return not self.is_peer_slow


class FakeStop:
    """Counts received signals, as set by the test."""

    count = 0


def grammars_of(scheduler: Scheduler) -> Grammars:
    return Grammars(scheduler, None, GrammarCompiler(timeout_s=5))


def attribution_of(scheduler: Scheduler) -> CrashAttribution:
    return CrashAttribution(scheduler, SimulatedCrashJournal())


def weights_of(scheduler: Scheduler) -> WeightsControl:
    """Return a control without workers and journal, whose weights do not change."""
    return WeightsControl(scheduler, None, WeightsState(WeightsRecord(), None, lambda digest, version: digest))
