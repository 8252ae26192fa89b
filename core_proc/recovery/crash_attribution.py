"""`CrashAttribution`: finds the requests that crash the core or its workers, so that they fail alone.

`protocol/crash_bisection.py` implements the search; this module applies it to live requests and their progress. A crash
journal hands the state to the next core, under names that frontends keep when they reconnect. Requests that may not
run yet are held in `quarantine.py`.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.core_proc.recovery.crash_journal import CrashRecord
from octavo.core_proc.request import Request, RequestKey, RequestState
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.crash_bisection import CrashBisection
from octavo.protocol.requests import Submit

logger = logging.getLogger(__name__)

MAX_CULPRITS = 1000
"""Guilty requests that are remembered until their frontends have reconnected and got the error."""


class JournalWriter(Protocol):
    """The part of `CrashJournal` that is needed here."""

    def mark_in_flight(self, name: bytes) -> None:
        """Record that this request may be what crashes the core from now on."""

    def clear(self, name: bytes) -> None:
        """Record that the request has ended, or waits without being touched."""

    def mark_only(self, names: Iterable[bytes]) -> None:
        """Mark these requests as in flight, and clear all others."""

    def save(self, record: CrashRecord) -> None:
        """Replace the stored crash record."""

    def note_progress(self) -> None:
        """Record that a request has got a token."""

    def note_isolation(self, *, is_isolating: bool) -> None:
        """Record whether suspects run isolated from now on."""


class CrashAttribution:
    """The requests of one scheduler that were in flight when a core or its workers crashed.

    Args:
        scheduler: owns the requests.
        journal: written before anything can go wrong.
    """

    def __init__(self, scheduler: Scheduler, journal: JournalWriter) -> None:
        self.version = 0
        """Changes whenever `can_run` may answer differently."""
        self._journal = journal
        self._scheduler = scheduler
        self._suspects: CrashBisection[bytes] = CrashBisection()
        self._culprits: dict[bytes, str] = {}
        """Guilty requests and their error messages; the oldest are dropped first."""
        self._names: dict[RequestKey, bytes] = {}
        """Of every request that was forwarded and has not ended."""
        self._num_present: dict[bytes, int] = {}
        """How many live requests have a name, forwarded or not."""
        self._safe_lengths: dict[RequestKey, int] = {}
        """For each suspect the number of outputs that proves it got past the point of the crash."""
        self._allowed: frozenset[bytes] | None = None
        """The requests that may run; None: all."""
        self._is_stale = False
        """True when suspects or live requests have changed since `_allowed` was computed."""
        self._must_sync_journal = False
        """True while the journal marks requests that may not run: steps with them were still in flight."""
        self._has_progressed = False

    @property
    def is_isolating(self) -> bool:
        """True while a group of suspects runs and all other requests wait."""
        return self._allowed is not None

    def record_core_crash(self, record: CrashRecord, in_flight: Sequence[bytes], cause: str) -> None:
        """Take over from the previous core. Must be called before any other method.

        Args:
            record: what that core knew.
            in_flight: the requests that may have crashed it.
            cause: how it died.
        """
        self._suspects = CrashBisection(record.suspicion)
        self._culprits = dict(record.culprits)
        if (culprit := self._suspects.record_crash(in_flight)) is not None:
            self._culprits[culprit] = f"the engine crashed each time it ran this request alone: {cause}"
            self._culprits = dict(list(self._culprits.items())[-MAX_CULPRITS:])
        self._save()

    def error_of(self, name: bytes) -> str | None:
        """Return the error message of a guilty request, None for all others."""
        return self._culprits.get(name)

    def reset(self, name: bytes) -> None:
        """Forget what is known of a name: a new request uses it."""
        if name in self._suspects or name in self._culprits:
            self._culprits.pop(name, None)
            self._clear([name])
            self._save()

    def add(self, name: bytes) -> None:
        """Count a live request."""
        self._num_present[name] = self._num_present.get(name, 0) + 1
        if name in self._suspects:
            self._is_stale = True

    def remove(self, name: bytes) -> None:
        """Uncount a request that was counted and is not live any more."""
        if self._num_present[name] > 1:
            self._num_present[name] -= 1
            return
        del self._num_present[name]
        if name in self._suspects:
            self._is_stale = True

    def is_tracked(self, key: RequestKey) -> bool:
        """Return whether a live request was forwarded."""
        return key in self._names

    def can_run(self, name: bytes) -> bool:
        """Return whether a request may be forwarded now; otherwise it must not be touched."""
        return not self._suspects.is_isolated(name) if self._allowed is None else name in self._allowed

    def track(self, name: bytes, key: RequestKey, submit: Submit) -> None:
        """Note that a counted request is about to be forwarded."""
        self._names[key] = name
        self._journal.mark_in_flight(name)
        if name in self._suspects:
            num_outputs = len(submit.resume_output_token_ids)
            self._safe_lengths[key] = num_outputs + (submit.stream_interval if num_outputs else 1)
        if self._allowed is not None:
            self._restrict()

    def finish(self, key: RequestKey) -> None:
        """Note that a forwarded request has ended; other keys are ignored."""
        if (name := self._names.pop(key, None)) is None:
            return
        self.remove(name)
        if name not in self._num_present:
            self._journal.clear(name)
        if self._safe_lengths.pop(key, None) is not None:
            self._clear([name])

    def note_progress(self) -> None:
        """Note that a request has got a token."""
        if not self._has_progressed:
            self._has_progressed = True
            self._journal.note_progress()

    def record_worker_crash(self, cause: str) -> list[ClientEvent]:
        """Take back all requests that the workers had, and fail the guilty one, if one is known.

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
        by_name = {self._names[key]: request for key, request in live.items()}
        if (culprit := self._suspects.record_crash(list(by_name))) is not None:
            client, request_id = key = by_name[culprit].key
            del self._safe_lengths[key]
            logger.error("request %s of frontend %s crashes the workers: it fails", request_id, client.hex())
            events = scheduler.fail(by_name[culprit], f"this request crashes the workers that compute it: {cause}")
        self._select_allowed()
        return events

    def update(self) -> None:
        """Clear the suspects that got past the point of the crash, and let the next requests run."""
        if self._safe_lengths:
            safe = [key for key, length in self._safe_lengths.items() if self._has_reached(key, length)]
            for key in safe:
                del self._safe_lengths[key]
            if safe:
                self._clear([self._names[key] for key in safe])
        if self._is_stale:
            self._select_allowed()
        if self._must_sync_journal:
            self._sync_journal()

    def _has_reached(self, key: RequestKey, num_outputs: int) -> bool:
        request: Request | None = self._scheduler.requests.get(key)
        return request is not None and request.num_known_outputs >= num_outputs

    def _clear(self, names: list[bytes]) -> None:
        self._suspects.clear(names)
        self.version += 1
        self._is_stale = True

    def _select_allowed(self) -> None:
        """Compute which requests may run, and save what is known."""
        self._is_stale = False
        self.version += 1
        allowed = self._suspects.select_group(self._num_present)
        if allowed is not None and self._allowed is None:
            num_suspects = sum(name in self._suspects for name in self._num_present)
            logger.warning("%d requests may have crashed the engine: running them in isolation", num_suspects)
        if (allowed is None) is not (self._allowed is None):
            self._journal.note_isolation(is_isolating=allowed is not None)
        if allowed != self._allowed:
            self._allowed = allowed
            self._must_sync_journal = True
        self._restrict()
        self._save()

    def _restrict(self) -> None:
        allowed = self._allowed
        keys = None if allowed is None else frozenset(key for key, name in self._names.items() if name in allowed)
        if keys != self._scheduler.allowed:
            self._scheduler.restrict(keys)

    def _sync_journal(self) -> None:
        """Mark only the requests that may run, as soon as no step in flight computes others."""
        can_run = self._scheduler.allowed
        in_flight = (request for record in self._scheduler.in_flight for request in record.requests)
        if can_run is None or all(request.key in can_run for request in in_flight):
            self._must_sync_journal = False
            self._journal.mark_only(name for key, name in self._names.items() if can_run is None or key in can_run)

    def _save(self) -> None:
        self._journal.save(CrashRecord(self._suspects.state, self._culprits))
