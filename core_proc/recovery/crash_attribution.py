"""`CrashAttribution`: finds the requests that crash the core or its workers, so that they fail alone.

`protocol/crash_bisection.py` implements the search. This module applies it to live requests and their progress. A crash
journal passes the state to the next core, under names that stay the same when frontends reconnect. Requests that may
not run yet are held in `quarantine.py`.
"""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from octavo.core_proc.recovery.crash_journal import CrashRecord
from octavo.core_proc.request import RequestState
from octavo.core_proc.request_map import RequestKey, RequestMap
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.workers.group import Turn
from octavo.protocol.crash_bisection import CrashBisection
from octavo.protocol.requests import Submit

logger = logging.getLogger(__name__)

MAX_CULPRITS = 1000
"""Number of guilty requests that are remembered until their frontends have reconnected and received the error."""


class JournalWriter(Protocol):
    """The part of `CrashJournal` that is used here."""

    def add(self, name: bytes) -> int:
        """Record that this request may crash the core from now on, and return its slot."""

    def name(self, slot: int) -> bytes:
        """Return the name of the request in a slot."""

    def mark_in_flight(self, slot: int, *, is_in_flight: bool) -> None:
        """Record whether a request may crash the core, or waits without being processed."""

    def remove(self, slot: int) -> None:
        """Record that the request in a slot has ended."""

    def save(self, record: CrashRecord) -> None:
        """Replace the stored crash record."""

    def note_progress(self) -> None:
        """Record that a request has received a token."""

    def note_isolation(self, *, is_isolating: bool) -> None:
        """Record whether suspects run in isolation from now on."""


class CrashAttribution:
    """The requests of one scheduler that were in flight when a core or its workers crashed.

    Args:
        scheduler: owns the requests.
        journal: written before a request can do any harm.
    """

    def __init__(self, scheduler: Scheduler, journal: JournalWriter) -> None:
        self.version = 0
        """Changes whenever the result of `can_run` may change."""
        self._journal = journal
        self._scheduler = scheduler
        self._suspects: CrashBisection[bytes] = CrashBisection()
        self._culprits: dict[bytes, str] = {}
        """Error messages of guilty requests by name. The oldest are dropped first."""
        self._slots = RequestMap[int]()
        """Journal slots of all requests that were forwarded and have not ended. The journal holds their names."""
        self._held: dict[RequestKey, bytes] = {}
        """Names of the live requests that were not forwarded."""
        self._live_suspects: dict[bytes, set[RequestKey]] = {}
        """The live requests of each suspect, forwarded or not."""
        self._safe_lengths: dict[RequestKey, int] = {}
        """For each suspect, the number of outputs that proves it has passed the point of the crash."""
        self._allowed: frozenset[bytes] | None = None
        """Names of the requests that may run. None if all may."""
        self._is_stale = False
        """True if suspects or live requests have changed since `_allowed` was computed."""
        self._is_draining = False
        """True while steps in flight may compute requests that may not run any more. No other request starts until
        these steps have ended, so that a crash can be attributed to one of the two groups."""
        self._turn = Turn.OWN
        """Which requests may run together with those of other engines that share our steps."""
        self._has_progressed = False

    @property
    def is_isolating(self) -> bool:
        """True while a group of suspects runs and all other requests wait."""
        return self._allowed is not None

    def record_core_crash(self, record: CrashRecord, in_flight: Sequence[bytes], cause: str) -> None:
        """Take over from the previous core. Must be called before any other method.

        Args:
            record: the record of the previous core.
            in_flight: names of the requests that may have crashed it.
            cause: how it died.
        """
        self._suspects = CrashBisection(record.suspicion)
        self._culprits = dict(record.culprits)
        if (culprit := self._suspects.record_crash(in_flight)) is not None:
            self._culprits[culprit] = f"the engine crashed each time it ran this request alone: {cause}"
            self._culprits = dict(list(self._culprits.items())[-MAX_CULPRITS:])
        self._save()

    def error_of(self, name: bytes) -> str | None:
        """Return the error message of a guilty request. Return None for all other requests."""
        return self._culprits.get(name)

    def reset(self, name: bytes) -> None:
        """Forget everything about a name that a new request uses."""
        if name in self._suspects or name in self._culprits:
            self._culprits.pop(name, None)
            self._clear([name])
            self._save()

    def add(self, name: bytes, key: RequestKey) -> None:
        """Add a new request that is not forwarded yet."""
        self._held[key] = name
        if name in self._suspects:
            self._live_suspects.setdefault(name, set()).add(key)
            self._is_stale = True

    def remove(self, key: RequestKey) -> None:
        """Note that a request has ended before it was forwarded."""
        self._note_end(self._held.pop(key), key)

    @property
    def tracked(self) -> RequestMap[int]:
        """Journal slots of the live requests that were forwarded; read-only."""
        return self._slots

    def can_run(self, name: bytes) -> bool:
        """Return whether a request may be forwarded now. If not, it must not be processed at all."""
        if self._allowed is None:
            return not self._suspects.is_isolated(name)
        return name in self._allowed and not self._is_draining

    def track(self, key: RequestKey, submit: Submit) -> None:
        """Note that an added request is about to be forwarded."""
        name = self._held.pop(key)
        self._slots[key] = self._journal.add(name)
        if name in self._suspects:
            num_outputs = len(submit.resume_output_token_ids)
            self._safe_lengths[key] = num_outputs + (submit.stream_interval if num_outputs else 1)
        if self._allowed is not None:
            self._restrict()

    def finish(self, key: RequestKey) -> None:
        """Note that a forwarded request has ended. Other keys are ignored."""
        if (slot := self._slots.pop(key)) is None:
            return
        name = self._journal.name(slot)
        self._journal.remove(slot)
        self._note_end(name, key)
        if self._safe_lengths.pop(key, None) is not None:
            self._clear([name])

    def note_progress(self) -> None:
        """Note that a request has received a token."""
        if not self._has_progressed:
            self._has_progressed = True
            self._journal.note_progress()

    def record_worker_crash(self, cause: str) -> list[ClientEvent]:
        """Take back all requests from the workers, and fail the guilty one if it is known.

        Args:
            cause: how the workers died.
        """
        scheduler = self._scheduler
        in_flight = [request for record in scheduler.in_flight for request in record.requests]
        live = {request.key: request for request in in_flight if request.state is not RequestState.FINISHED}
        for key, request in live.items():
            safe_length = request.num_known_outputs + max(1, request.num_pending_tokens)
            self._safe_lengths[key] = max(safe_length, self._safe_lengths.get(key, 0))
        scheduler.lose_workers()
        events: list[ClientEvent] = []
        by_name = {self._name_of(key): request for key, request in live.items()}
        culprit = self._suspects.record_crash(list(by_name), is_alone=self._turn is Turn.OWN)
        self._find_live_suspects()
        if culprit is not None:
            client, request_id = key = by_name[culprit].key
            del self._safe_lengths[key]
            logger.error("request %s of frontend %s crashes the workers: it fails", request_id, client.hex())
            events = scheduler.fail(by_name[culprit], f"this request crashes the workers that compute it: {cause}")
        self._select_allowed()
        return events

    def update(self) -> None:
        """Clear the suspects that have passed the point of the crash, and let the next requests run."""
        if self._safe_lengths:
            safe = [key for key, length in self._safe_lengths.items() if self._has_reached(key, length)]
            for key in safe:
                del self._safe_lengths[key]
            if safe:
                self._clear([self._name_of(key) for key in safe])
        if self._is_stale:
            self._select_allowed()
        if self._is_draining:
            self._drain()

    def set_turn(self, turn: Turn) -> None:
        """Run only the requests that other engines allow us, if they share our steps."""
        if turn is not self._turn:
            self._turn = turn
            self._is_draining = True
            self._restrict()
            self._drain()

    def _name_of(self, key: RequestKey) -> bytes:
        """Return the name of a forwarded request."""
        return self._journal.name(self._slots[key])

    def _note_end(self, name: bytes, key: RequestKey) -> None:
        if (keys := self._live_suspects.get(name)) is None:
            return
        keys.discard(key)
        if not keys:
            del self._live_suspects[name]
            self._is_stale = True

    def _find_live_suspects(self) -> None:
        """Find the suspects among all live requests."""
        self._live_suspects = {}
        tracked = ((key, self._journal.name(slot)) for key, slot in self._slots.items())
        for key, name in chain(self._held.items(), tracked):
            if name in self._suspects:
                self._live_suspects.setdefault(name, set()).add(key)

    def _has_reached(self, key: RequestKey, num_outputs: int) -> bool:
        request = self._scheduler.requests.get(key)
        return request is not None and request.num_known_outputs >= num_outputs

    def _clear(self, names: list[bytes]) -> None:
        self._suspects.clear(names)
        for name in names:
            self._live_suspects.pop(name, None)
        self.version += 1
        self._is_stale = True

    def _select_allowed(self) -> None:
        """Compute which requests may run, and save the state."""
        self._is_stale = False
        self.version += 1
        allowed = self._suspects.select_group(self._live_suspects)
        if allowed is not None and self._allowed is None:
            num_suspects = len(self._live_suspects)
            logger.warning("%d requests may have crashed the engine: running them in isolation", num_suspects)
        if (allowed is None) is not (self._allowed is None):
            self._journal.note_isolation(is_isolating=allowed is not None)
        if allowed != self._allowed:
            self._allowed = allowed
            self._is_draining = True
        self._restrict()
        self._save()

    def _restrict(self) -> None:
        keys = self._allowed_keys()
        if keys is not None and self._is_draining:
            keys &= self._scheduler.allowed or frozenset()  # a group that has only become smaller continues
        if keys != self._scheduler.allowed:
            self._scheduler.restrict(keys)

    def _allowed_keys(self) -> frozenset[RequestKey] | None:
        """Return the forwarded requests that may run. Return None if all may."""
        if self._turn is Turn.NONE:
            return frozenset()
        if self._allowed is None:
            return None
        live = (key for name in self._allowed for key in self._live_suspects.get(name, ()))
        return frozenset(key for key in live if key in self._slots)

    def _drain(self) -> None:
        """Let the next requests run and mark only them in the journal, once no step in flight computes others."""
        keys = self._allowed_keys()
        in_flight = (request for record in self._scheduler.in_flight for request in record.requests)
        if keys is None or all(request.key in keys for request in in_flight):
            self._is_draining = False
            self.version += 1
            for key, slot in self._slots.items():
                self._journal.mark_in_flight(slot, is_in_flight=keys is None or key in keys)
            self._restrict()

    def _save(self) -> None:
        self._journal.save(CrashRecord(self._suspects.state, self._culprits))
