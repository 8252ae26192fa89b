"""What frontends can ask of the core, and what they hear: the only file that knows both messages and scheduler.

Decides nothing about steps, and never blocks.
"""

import logging
import os
from collections.abc import Callable
from typing import assert_never

from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.recovery.blame import Blame
from octavo.core_proc.recovery.gate import Gate
from octavo.core_proc.request import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.waiting import explain_waiting
from octavo.core_proc.snapshot import take_snapshot
from octavo.core_proc.workers.group import StepExecutor
from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.channel import FrontendRouter
from octavo.protocol.events import (
    BoolResult,
    CallFailed,
    EngineDying,
    EngineFacts,
    Failed,
    FailureKind,
    Refused,
    Reply,
    StatsReport,
    UtilityResult,
    Welcome,
    refuse_version,
)
from octavo.protocol.ids import RequestId
from octavo.protocol.lifecycle import ProcessState, StopSignal
from octavo.protocol.log import LimitedLog
from octavo.protocol.malformed import Malformed
from octavo.protocol.requests import (
    Abort,
    Call,
    Connect,
    GetSnapshot,
    GetStats,
    Request,
    ResetPrefixCache,
    StartProfile,
    StopProfile,
    Submit,
    Vocabulary,
)
from octavo.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0
WAITING_LOG_INTERVAL_S = 10.0
BACKLOG_RETRY_S = 0.02
"""A slow frontend's socket does not say when it has room again, so it is tried this often."""
FAREWELL_RETRY_S = 1.0
"""The same for one that was given up, if there is nothing else to do."""
LAST_WORDS_S = 2.0
"""How long a core that has nothing left to do waits for frontends to read what it owes them."""


class FrontendService:
    """Serves every connected frontend from one scheduler."""

    def __init__(
        self,
        router: FrontendRouter,
        outbox: Outbox,
        scheduler: Scheduler,
        grammars: Grammars,
        workers: StepExecutor,
        blame: Blame,
        facts: EngineFacts,
        stop: StopSignal,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._outbox = outbox
        self._scheduler = scheduler
        self._grammars = grammars
        self._workers = workers
        self._facts = facts
        self._stop = stop
        self._clock = clock
        self._gate = Gate(blame, self._take_in, self._is_taken_in, scheduler.config.max_num_queued_reqs)
        self._refusals = LimitedLog(logger)
        self._state = ProcessState.READY
        self._is_busy = False
        self._next_stats = 0.0
        self._next_waiting_log = 0.0
        self._last_words_deadline = 0.0

    @property
    def is_open(self) -> bool:
        """False once the core was told to stop and owes nobody anything."""
        return self._state is not ProcessState.STOPPED

    @property
    def has_waited_enough(self) -> bool:
        """True once a core with nothing left to do has waited as long as it may for frontends that do not read all."""
        return 0.0 < self._last_words_deadline <= self._clock()

    @property
    def timeout_s(self) -> float | None:
        """How long the core may sleep when nothing happens; None: for ever."""
        if self._outbox.has_lost or self._gate.has_ready:
            return 0.0
        is_done = self._state is ProcessState.DRAINING and not self._has_requests
        if self._outbox.has_backlog or (is_done and self._awaits_frontends):
            return BACKLOG_RETRY_S
        if self._is_owed_a_turn and not self._has_requests:
            return 0.0
        if self._is_busy:
            return max(0.0, self._next_stats - self._clock())
        return FAREWELL_RETRY_S if self._outbox.has_given_up else None

    @property
    def _awaits_frontends(self) -> bool:
        """True while one that has not read all that it is owed, or was given up and comes back, is given time."""
        now = self._clock()
        owes = self._outbox.has_backlog or self._outbox.has_given_up
        return (owes and not self.has_waited_enough) or now < self._outbox.last_told + LAST_WORDS_S

    @property
    def _is_owed_a_turn(self) -> bool:
        """True when the end of the last request has consequences, for which nothing would wake the core."""
        return self._is_busy or self._state is not ProcessState.READY

    def serve(self, *, has_mail: bool = True) -> None:
        """Handle what has arrived: signals, messages, lost frontends, and the time.

        Args:
            has_mail: whether frontends may have sent anything; else nobody asks the socket.
        """
        if self._stop.count:
            self._obey_signals()
        if has_mail:
            for client, request in self._router.receive():
                self._handle(client, request)
        if self._outbox.has_backlog or self._outbox.has_given_up:
            self._outbox.flush()
        self.deliver(self._grammars.take_ready())
        if self._gate.has_requests:
            self.deliver(self._gate.take_ready())
        self._report()
        if self._outbox.has_lost:
            self._forget_lost()
        if self._state is ProcessState.DRAINING:
            self._drain()

    def deliver(self, events: list[ClientEvent]) -> None:
        """Send events to the frontends they are for."""
        if events:
            self._gate.note(events)
            self._outbox.put(events)

    def say_last_words(self, cause: str) -> None:
        """Say why this process is about to exit. Its requests are the frontends': another core may go on with them."""
        self._outbox.flush()
        self._outbox.broadcast(EngineDying(cause))

    def say_goodbye(self) -> None:
        """Tell every frontend that this was an orderly shutdown."""
        self._outbox.flush()
        self._outbox.broadcast(EngineDying(""))

    def _obey_signals(self) -> None:
        if self._stop.count and self._state is ProcessState.READY:
            self._state = self._state.move(ProcessState.DRAINING)
            logger.info("draining: %d requests are left to finish", len(self._request_keys()))
        if self._stop.count > 1:
            for client in dict.fromkeys(client for client, _ in self._request_keys()):
                self.deliver(self._abort_all(client))

    def _drain(self) -> None:
        """Stop when nothing is left to do, but give frontends a bounded time to read how their requests ended."""
        if self._has_requests:
            self._last_words_deadline = 0.0
            return
        self._last_words_deadline = self._last_words_deadline or self._clock() + LAST_WORDS_S
        if self._stop.count > 1 or not self._awaits_frontends:
            self._state = self._state.move(ProcessState.STOPPED)

    def _handle(self, client: bytes, request: Request | Malformed) -> None:
        if isinstance(request, Connect):
            self._welcome(client, request)
            return
        if not self._outbox.is_connected(client):
            self._refuse(client, Refused("the first message of a connection must be Connect"))
            return
        match request:
            case Submit():
                self.deliver(self._submit(client, request))
            case Abort():
                self.deliver(self._abort(client, request.request_ids))
            case Vocabulary():
                self._grammars.learn(request)
            case Call():
                self._call(client, request)
            case Malformed():
                self._answer_malformed(client, request)
            case _:
                assert_never(request)

    def _welcome(self, client: bytes, connect: Connect) -> None:
        if connect.version != PROTOCOL_VERSION:
            self._refuse(client, refuse_version(connect.version))
            return
        logger.info("frontend %s connected: %s", client.hex(), connect.client or "unnamed")
        self._gate.connect(client, connect.frontend_id)
        self._outbox.connect(client)
        self._outbox.send(client, Welcome(self._facts))

    def _refuse(self, client: bytes, refused: Refused) -> None:
        # Of one that has left already, the last requests come in after its end was noticed: no news for the log.
        if self._outbox.send(client, refused):
            self._refusals.warning("refused frontend %s: %s", client.hex(), refused.message)

    def _answer_malformed(self, client: bytes, message: Malformed) -> None:
        """Tell who waits for an answer that there will be none."""
        if message.request_id is not None:
            failed = Failed(message.request_id, FailureKind.INVALID, f"the request cannot be read: {message.fault}")
            # Not the end of a live request that has the same name: that one was read.
            if (client, message.request_id) not in self._request_keys():
                self.deliver([(client, failed)])
        elif message.call_id is not None:
            self._outbox.reply(client, Reply(message.call_id, CallFailed(f"cannot be read: {message.fault}")))

    def _submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        # What was accepted before is finished, also when its connection has broken meanwhile.
        is_late = self._state is not ProcessState.READY and (not submit.is_continued or self._stop.count > 1)
        if is_late:
            message = "the engine is shutting down and takes no new requests"
            return [(client, Failed(submit.request_id, FailureKind.OVERLOADED, message))]
        if submit.adapter is not None:
            message = f"this engine has no adapter {submit.adapter!r}"
            return [(client, Failed(submit.request_id, FailureKind.INVALID, message, "adapter"))]
        return self._gate.submit(client, submit)

    def _take_in(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        submit_to = self._scheduler if submit.grammar is None else self._grammars
        return submit_to.submit(client, submit)

    def _is_taken_in(self, key: RequestKey) -> bool:
        return key in self._scheduler.requests or self._grammars.is_waiting(key)

    def _call(self, client: bytes, call: Call) -> None:
        """Answer a utility call, now or when the workers have."""

        def answer(result: UtilityResult) -> None:
            self._outbox.reply(client, Reply(call.call_id, result))

        def answer_profile(fault: str) -> None:
            answer(CallFailed(fault) if fault else BoolResult(True))

        match call.utility:
            case GetStats():
                answer(self._stats())
            case GetSnapshot():
                answer(take_snapshot(self._scheduler, self._stats(), self._clock()))
            case ResetPrefixCache():
                answer(BoolResult(self._scheduler.reset_prefix_cache()))
            case StartProfile(directory):
                if fault := _fault_of_directory(directory):
                    answer(CallFailed(fault))
                    return
                self._workers.profile(directory, answer_profile)
            case StopProfile():
                self._workers.profile(None, answer_profile)
            case _:
                assert_never(call.utility)

    def _forget_lost(self) -> None:
        for client in self._outbox.take_lost():
            num_requests = len(self._request_keys())
            self._gate.note(self._abort_all(client))
            self._gate.disconnect(client)
            if num_aborted := num_requests - len(self._request_keys()):
                logger.info("aborted %d requests of frontend %s", num_aborted, client.hex())

    def _abort_all(self, client: bytes) -> list[ClientEvent]:
        return self._abort(client, [request_id for owner, request_id in self._request_keys() if owner == client])

    def _abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        waiting = self._gate.abort(client, request_ids) + self._grammars.abort(client, request_ids)
        return waiting + self._scheduler.abort(client, request_ids)

    def _request_keys(self) -> list[RequestKey]:
        """Return the names of all live requests."""
        return [*self._scheduler.requests, *self._grammars.waiting_keys, *self._gate.waiting_keys]

    @property
    def _has_requests(self) -> bool:
        return self._scheduler.has_requests or self._grammars.has_requests or self._gate.has_requests

    def _report(self) -> None:
        """Send statistics about once a second while there is work, and once when there is none left.

        To a frontend that has requests but no events this is also the probe that shows it is gone.
        """
        was_busy, self._is_busy = self._is_busy, self._has_requests
        now = self._clock()
        if self._is_busy and not was_busy:
            self._next_stats = now + STATS_INTERVAL_S
        if (self._is_busy and now >= self._next_stats) or (was_busy and not self._is_busy):
            self._next_stats = now + STATS_INTERVAL_S
            self._outbox.broadcast(StatsReport(self._stats()))
            self._log_waiting(now)

    def _stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.malformed_frames = self._router.malformed_frames
        stats.num_deferred = len(self._grammars.waiting_keys) + len(self._gate.waiting_keys)
        stats.num_waiting += stats.num_deferred
        return stats

    def _log_waiting(self, now: float) -> None:
        reasons = [explain_waiting(self._scheduler, now)]
        if num_compiling := len(self._grammars.waiting_keys):
            reasons.append(f"{num_compiling} requests wait for their grammars to be compiled")
        if num_held := len(self._gate.waiting_keys):
            reasons.append(f"{num_held} requests wait until one is found that kills the engine")
        if any(reasons) and now >= self._next_waiting_log:
            self._next_waiting_log = now + WAITING_LOG_INTERVAL_S
            logger.info("%s", "; ".join(filter(None, reasons)))


def _fault_of_directory(path: str) -> str:
    """Return why nothing can be written in a directory, made if need be: a worker that finds out ends the engine."""
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        return f"cannot make the directory {path!r}: {error}"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"cannot write in the directory {path!r}"
