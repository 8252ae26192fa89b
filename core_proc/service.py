"""`FrontendService`: handles the messages of frontends. The only module that knows both messages and scheduler.

Decides nothing about steps and never blocks. The work per iteration is bounded for any input.
"""

import logging
from collections.abc import Callable
from typing import assert_never

import msgspec

from octavo.core_proc.admin_calls import AdminCalls
from octavo.core_proc.cache_feed import CacheFeed
from octavo.core_proc.collector import IdleCollector
from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.pending_aborts import PendingAborts
from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.recovery.quarantine import Quarantine
from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.queue_report import explain_waiting
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.transfer.base import RequestConnector
from octavo.core_proc.utility_calls import UtilityCalls
from octavo.core_proc.weights.control import WeightsControl
from octavo.core_proc.workers.commands import StepExecutor
from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.channel import FrontendRouter
from octavo.protocol.events import (
    CallFailed,
    EngineDying,
    EngineFacts,
    FactsChanged,
    Failed,
    FailureKind,
    Refused,
    Reply,
    StatsReport,
    Welcome,
    reject_version,
)
from octavo.protocol.ids import RequestId
from octavo.protocol.lifecycle import ProcessState, StopSignal
from octavo.protocol.log import LimitedLog
from octavo.protocol.malformed import Malformed
from octavo.protocol.requests import (
    Abort,
    Call,
    Connect,
    FrontendMessage,
    ModelVocabulary,
    Submit,
    WatchCache,
)
from octavo.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0
WAITING_LOG_INTERVAL_S = 10.0
BACKLOG_RETRY_S = 0.02
"""Seconds between attempts to send to a slow frontend: its socket does not signal when it has room again."""
DROPPED_RETRY_S = 1.0
"""Seconds between attempts of an idle engine to notify a dropped frontend."""
FLUSH_TIMEOUT_S = 2.0
"""Seconds that a draining core without requests waits for slow frontends to read their last events."""


class FrontendService:
    """Serves every connected frontend from one scheduler."""

    def __init__(
        self,
        router: FrontendRouter,
        outbox: Outbox,
        scheduler: Scheduler,
        grammars: Grammars,
        workers: StepExecutor,
        attribution: CrashAttribution,
        facts: EngineFacts,
        stop: StopSignal,
        clock: Callable[[], float],
        *,
        collector: IdleCollector,
        weights: WeightsControl,
        connector: RequestConnector,
    ) -> None:
        self._connector = connector
        self._collector = collector
        self._router = router
        self._outbox = outbox
        self._scheduler = scheduler
        self._grammars = grammars
        self._facts = facts
        self._stop = stop
        self._clock = clock
        self._quarantine = Quarantine(attribution, self._accept, self._is_live, scheduler.config.max_num_queued_reqs)
        self._aborts = PendingAborts(self._end)
        self._cache_feed = CacheFeed(scheduler.cache, outbox, lambda: self._quarantine.num_live, clock)
        self._rejections = LimitedLog(logger)
        self._weights = weights
        weights.serve(self)
        self._admin = AdminCalls(scheduler, self._quarantine, self._aborts, clock)
        self._calls = UtilityCalls(scheduler, workers, weights, outbox, self._stats, self._admin, clock)
        self._state = ProcessState.READY
        self._is_busy = False
        self._next_stats = 0.0
        self._next_waiting_log = 0.0
        self._flush_deadline = 0.0

    @property
    def is_open(self) -> bool:
        """False once the core was told to stop and has finished all requests."""
        return self._state is not ProcessState.STOPPED

    @property
    def has_waited_enough(self) -> bool:
        """True if the time for slow frontends to read their last events is over."""
        return 0.0 < self._flush_deadline <= self._clock()

    @property
    def timeout_s(self) -> float | None:
        """Seconds that the core may sleep. None if it may sleep until something happens."""
        timeouts_s = (self._own_timeout_s, self._cache_feed.timeout_s)
        return min((timeout_s for timeout_s in timeouts_s if timeout_s is not None), default=None)

    @property
    def _own_timeout_s(self) -> float | None:
        if self._outbox.has_lost or self._aborts or self._quarantine.has_ready:
            return 0.0
        is_done = self._state is ProcessState.DRAINING and not self._has_requests
        if self._outbox.has_backlog or (is_done and self._awaits_frontends):
            return BACKLOG_RETRY_S
        if self._needs_another_iteration and not self._has_requests:
            return 0.0
        if self._is_busy:
            return max(0.0, self._next_stats - self._clock())
        return DROPPED_RETRY_S if self._outbox.has_dropped else None

    @property
    def _awaits_frontends(self) -> bool:
        """True while slow frontends, and dropped ones that may reconnect, have time left to read."""
        now = self._clock()
        owes = self._outbox.has_backlog or self._outbox.has_dropped
        return (owes and not self.has_waited_enough) or now < self._outbox.last_notice_s + FLUSH_TIMEOUT_S

    @property
    def _needs_another_iteration(self) -> bool:
        """True if an iteration must follow the end of the last request, although no event would wake the core."""
        return self._is_busy or self._state is not ProcessState.READY

    def serve(self, *, has_messages: bool = True) -> None:
        """Run one iteration: signals, messages, lost frontends, and everything that is due.

        Args:
            has_messages: whether frontends may have sent messages. If not, the socket is not read.
        """
        self._aborts.begin_iteration()
        if self._stop.count:
            self._handle_signals()
        if has_messages:
            for client, message in self._router.receive():
                self._handle(client, message)
        if self._outbox.has_backlog or self._outbox.has_dropped:
            self._outbox.flush()
        self._start_transferred()
        self.deliver(self._grammars.take_ready())
        if self._quarantine.num_held:
            self.deliver(self._quarantine.release_ready())
        self._report()
        if self._outbox.has_lost:
            self._abort_lost()
        if self._aborts:
            self._aborts.proceed()
        if self._state is ProcessState.DRAINING:
            self._drain()
        self._cache_feed.flush()

    def advance(self) -> bool:
        """Advance a change of weights in progress. Return whether steps may be planned now."""
        self._weights.advance()
        return self._weights.may_plan

    @property
    def has_forwarded(self) -> bool:
        """Whether any live request is not held in quarantine."""
        return self._scheduler.has_requests or self._num_preparing > 0 or bool(self._aborts)

    def is_connected(self, client: bytes) -> bool:
        """Return whether a frontend is connected."""
        return self._outbox.is_connected(client)

    def abort_all(self) -> None:
        """Abort all live requests with finish reason "abort", now or in later iterations."""
        for client in self._quarantine.clients:
            self._aborts.add(client, self._quarantine.requests_of(client))

    def hold(self, *, is_open: bool) -> None:
        """Hold new requests back; stop holding them if `is_open`."""
        self._quarantine.hold(is_open=is_open)

    def announce(self, changed: FactsChanged) -> None:
        """Announce the current weights to every frontend, including those that connect later."""
        self._facts = msgspec.structs.replace(self._facts, **msgspec.structs.asdict(changed))
        self._outbox.announce(changed)

    def deliver(self, events: list[ClientEvent]) -> None:
        """Send events to their frontends, and note which requests have ended."""
        if events:
            if ended := self._quarantine.observe(events):
                self._connector.note_ended(ended)
            self._outbox.put(events)

    def announce_failure(self, cause: str) -> None:
        """Notify every frontend why this process is about to exit. Frontends keep their requests for the next core."""
        self._outbox.flush()
        self._outbox.broadcast(EngineDying(cause))

    def announce_shutdown(self) -> None:
        """Notify every frontend that this was an orderly shutdown."""
        self._outbox.flush()
        self._outbox.broadcast(EngineDying(""))

    def _handle_signals(self) -> None:
        if self._stop.count and self._state is ProcessState.READY:
            self._state = self._state.move(ProcessState.DRAINING)
            logger.info("draining: waiting for %d requests to finish", self._quarantine.num_live)
        if self._stop.count > 1:
            self.abort_all()

    def _drain(self) -> None:
        """Stop once all requests have ended, and frontends have read their last events or the time for that is over."""
        if self._has_requests:
            self._flush_deadline = 0.0
            return
        self._flush_deadline = self._flush_deadline or self._clock() + FLUSH_TIMEOUT_S
        if self._stop.count > 1 or not self._awaits_frontends:
            self._state = self._state.move(ProcessState.STOPPED)

    def _handle(self, client: bytes, message: FrontendMessage | Malformed) -> None:
        if isinstance(message, Connect):
            self._welcome(client, message)
            return
        if not self._outbox.is_connected(client):
            self._reject(client, Refused("the first message of a connection must be Connect"))
            return
        match message:
            case Submit():
                self.deliver(self._submit(client, message))
            case Abort():
                self._aborts.add(client, message.request_ids)
            case ModelVocabulary():
                self._grammars.set_vocabulary(message)
            case WatchCache(number):
                self._cache_feed.watch(client, number)
            case Call():
                self._calls.answer(client, message)
            case Malformed():
                self._answer_malformed(client, message)
            case _:
                assert_never(message)

    def _welcome(self, client: bytes, connect: Connect) -> None:
        if connect.version != PROTOCOL_VERSION:
            self._reject(client, reject_version(connect.version))
            return
        logger.info("frontend %s connected: %s", client.hex(), connect.client or "unnamed")
        self._quarantine.connect(client, connect.frontend_id)
        self._outbox.connect(client)
        self._outbox.send(client, Welcome(self._facts))

    def _reject(self, client: bytes, rejected: Refused) -> None:
        # `send` fails for the last messages of a frontend that has just disconnected: these are not logged.
        if self._outbox.send(client, rejected):
            self._rejections.warning("rejected frontend %s: %s", client.hex(), rejected.message)

    def _answer_malformed(self, client: bytes, message: Malformed) -> None:
        """Reply to a message that cannot be decoded, if its request id or call id can still be read."""
        if message.request_id is not None:
            failed = Failed(message.request_id, FailureKind.INVALID, f"the request cannot be read: {message.fault}")
            # A live request with the same id was decoded earlier and continues.
            if not self._quarantine.is_live((client, message.request_id)):
                self.deliver([(client, failed)])
        elif message.call_id is not None:
            self._outbox.reply(client, Reply(message.call_id, CallFailed(f"cannot be read: {message.fault}")))

    def _submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        # A continued request was accepted before the drain began, so it may finish.
        is_late = self._state is not ProcessState.READY and (not submit.is_continued or self._stop.count > 1)
        if is_late or (self._admin.is_draining and not submit.is_continued):
            state = "is shutting down" if is_late else "drains (octavo admin drain) until octavo admin resume"
            message = f"the engine {state}, and takes no new requests"
            return [(client, Failed(submit.request_id, FailureKind.OVERLOADED, message))]
        if self._aborts.is_waiting(client, submit.request_id):
            # The frontend has aborted the request with this id, so it may reuse the id.
            self._aborts.finish(client, [submit.request_id])
        return self._quarantine.submit(client, submit)

    def _accept(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        if refusal := self._weights.refusal:
            return [(client, Failed(submit.request_id, FailureKind.OVERLOADED, refusal))]
        accepted = self._connector.submit(client, submit)
        return self._start(client, accepted) if isinstance(accepted, Submit) else accepted

    def _start(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        submit_to = self._scheduler if submit.grammar is None else self._grammars
        return submit_to.submit(client, submit)

    def _start_transferred(self) -> None:
        """Start the requests whose blocks have arrived from another engine, or will not arrive."""
        for client, submit in self._connector.take_ready():
            self.deliver(self._start(client, submit))

    @property
    def _num_preparing(self) -> int:
        """Number of requests that wait for a grammar or for blocks before the scheduler receives them."""
        return self._grammars.num_waiting + self._connector.num_waiting

    def _is_live(self, key: RequestKey) -> bool:
        return key in self._scheduler.requests or self._connector.is_waiting(key) or self._grammars.is_waiting(key)

    def _abort_lost(self) -> None:
        """Abort all requests of disconnected frontends."""
        for client in self._outbox.take_lost():
            if request_ids := self._quarantine.requests_of(client):
                logger.info("aborting %d requests of disconnected frontend %s", len(request_ids), client.hex())
                self._aborts.add(client, request_ids)
            self._quarantine.disconnect(client)
            self._weights.on_lost(client)

    def _end(self, client: bytes, request_ids: list[RequestId]) -> None:
        """Abort requests now, and notify their frontend unless it has disconnected."""
        events = self._quarantine.abort(client, request_ids)
        events += self._connector.abort(client, request_ids)
        events += self._grammars.abort(client, request_ids)
        events += self._scheduler.abort(client, request_ids)
        self.deliver(events)

    @property
    def _has_requests(self) -> bool:
        return self._scheduler.has_requests or self._num_preparing > 0 or self._quarantine.num_held > 0

    def _report(self) -> None:
        """Send statistics about once a second while there is work, and once when the engine becomes idle.

        The core also detects this way that a frontend without events has disconnected.
        """
        was_busy, self._is_busy = self._is_busy, self._has_requests or self._weights.is_held
        now = self._clock()
        if self._is_busy and not was_busy:
            self._next_stats = now + STATS_INTERVAL_S
        if (self._is_busy and now >= self._next_stats) or (was_busy and not self._is_busy):
            self._next_stats = now + STATS_INTERVAL_S
            self._outbox.broadcast(StatsReport(self._stats()))
            self._collector.poll(now, is_idle=not self._is_busy)
            self._log_waiting(now)

    def _stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.malformed_frames = self._router.malformed_frames
        stats.num_deferred = self._num_preparing + self._quarantine.num_held
        stats.num_waiting += stats.num_deferred
        return stats

    def _log_waiting(self, now: float) -> None:
        if now < self._next_waiting_log:
            return
        counts = {
            "wait for their grammars to be compiled": self._grammars.num_waiting,
            "wait for the KV connector": self._connector.num_waiting,
            "are held until the one that crashes the engine is found": self._quarantine.num_held,
        }
        reasons = [explain_waiting(self._scheduler, now), *(f"{n} requests {why}" for why, n in counts.items() if n)]
        if any(reasons):
            self._next_waiting_log = now + WAITING_LOG_INTERVAL_S
            logger.info("%s", "; ".join(filter(None, reasons)))
