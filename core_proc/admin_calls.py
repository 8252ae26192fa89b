"""`AdminCalls`: handles `octavo admin` calls, which cover the requests of all frontends."""

import logging
from collections.abc import Callable

from octavo.core_proc.pending_aborts import PendingAborts
from octavo.core_proc.recovery.quarantine import Quarantine
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.admin import (
    MAX_ROWS,
    AbortRequests,
    AdminCall,
    DrainEngine,
    ListRequests,
    RequestCount,
    RequestRow,
    RequestRows,
    SetLogLevel,
)
from octavo.protocol.events import BoolResult, UtilityResult
from octavo.protocol.ids import RequestId
from octavo.protocol.log import log_settings, set_log_level

logger = logging.getLogger(__name__)


class AdminCalls:
    """Handles operators' calls.

    Args:
        scheduler: the scheduler; read-only.
        quarantine: knows the live requests of all frontends.
        aborts: aborts requests.
        clock: the scheduler's clock.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        quarantine: Quarantine,
        aborts: PendingAborts,
        clock: Callable[[], float],
    ) -> None:
        self.is_draining = False
        """True while new requests are rejected because an operator has requested a drain."""
        self._scheduler = scheduler
        self._quarantine = quarantine
        self._aborts = aborts
        self._clock = clock

    def answer(self, call: AdminCall) -> UtilityResult:
        """Handle a call and return its result."""
        match call:
            case ListRequests(max_rows):
                return self._list(min(max(0, max_rows), MAX_ROWS))
            case AbortRequests(request_ids):
                return RequestCount(self._abort(None if request_ids is None else set(request_ids)))
            case DrainEngine(is_draining):
                self.is_draining = is_draining
                num_live = self._quarantine.num_live
                logger.info("%s: %d requests are live", "draining" if is_draining else "accepting requests", num_live)
                return RequestCount(num_live)
            case SetLogLevel(level):
                # Logged before the change, and as a warning: a higher level would hide the line.
                logger.warning("log level changes from %s to %s (octavo admin log-level)", log_settings()[0], level)
                set_log_level(level)
                return BoolResult(True)

    def _list(self, max_rows: int) -> RequestRows:
        now_s = self._clock()
        rows: list[RequestRow] = []
        for client in self._quarantine.clients:
            for request_id in self._quarantine.requests_of(client):
                if len(rows) >= max_rows:
                    break
                rows.append(self._row(client, request_id, now_s))
        return RequestRows(rows, self._quarantine.num_live, self.is_draining)

    def _row(self, client: bytes, request_id: RequestId, now_s: float) -> RequestRow:
        request = self._scheduler.requests.get((client, request_id))
        if request is None:
            return RequestRow(request_id, client.hex(), "deferred")
        return RequestRow(
            request_id,
            client.hex(),
            request.state.value,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_known_outputs,
            max_tokens=request.max_tokens,
            num_preemptions=request.num_preemptions,
            age_s=now_s - request.time_queued,
        )

    def _abort(self, wanted: set[RequestId] | None) -> int:
        """Abort these requests (None: all). Return how many of them are live."""
        count = 0
        for client in self._quarantine.clients:
            live = self._quarantine.requests_of(client)
            if found := live if wanted is None else [one for one in live if one in wanted]:
                logger.info("an operator aborts %d requests of frontend %s", len(found), client.hex())
                self._aborts.add(client, found)
                count += len(found)
        return count
