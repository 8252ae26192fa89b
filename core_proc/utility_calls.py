"""`UtilityCalls`: handles calls of frontends that concern the engine instead of a request."""

import os
from collections.abc import Callable

from octavo.core_proc.admin_calls import AdminCalls
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.snapshot import take_snapshot
from octavo.core_proc.weights.control import WeightsControl
from octavo.core_proc.workers.commands import StepExecutor
from octavo.protocol.admin import AbortRequests, DrainEngine, ListRequests, SetLogLevel
from octavo.protocol.events import BoolResult, CallFailed, Reply, UtilityResult
from octavo.protocol.requests import Call, GetSnapshot, GetStats, ResetPrefixCache, StartProfile, StopProfile
from octavo.protocol.stats import EngineStats


class UtilityCalls:
    """Passes each call to the component that handles it, and sends the result to the frontend.

    Args:
        scheduler: holds the requests and the prefix cache.
        workers: record profiles.
        weights: handles calls about weights.
        outbox: sends the replies.
        stats: returns the counters of the engine.
        admin: handles the calls of operators.
        clock: the scheduler's clock.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: StepExecutor,
        weights: WeightsControl,
        outbox: Outbox,
        stats: Callable[[], EngineStats],
        admin: AdminCalls,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._weights = weights
        self._outbox = outbox
        self._stats = stats
        self._admin = admin
        self._clock = clock

    def answer(self, client: bytes, call: Call) -> None:
        """Handle a call and reply, now or once the workers have responded."""

        def reply(result: UtilityResult) -> None:
            self._outbox.reply(client, Reply(call.call_id, result))

        def answer_profile(fault: str) -> None:
            reply(CallFailed(fault) if fault else BoolResult(True))

        match call.utility:
            case GetStats():
                reply(self._stats())
            case GetSnapshot():
                reply(take_snapshot(self._scheduler, self._stats(), self._clock()))
            case ResetPrefixCache():
                reply(BoolResult(self._scheduler.reset_prefix_cache()))
            case StartProfile(directory):
                if fault := _fault_of_directory(directory):
                    reply(CallFailed(fault))
                    return
                self._workers.profile(directory, answer_profile)
            case StopProfile():
                self._workers.profile(None, answer_profile)
            case ListRequests() | AbortRequests() | DrainEngine() | SetLogLevel():
                reply(self._admin.answer(call.utility))
            case _:
                self._weights.call(client, call.utility, reply)


def _fault_of_directory(path: str) -> str:
    """Create a directory if needed. Return why it is not writable, "" if it is.

    Checked here because a worker that cannot write its trace would fail, and the engine with it.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        return f"cannot make the directory {path!r}: {error}"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"cannot write in the directory {path!r}"
