"""`Blame`: what a scheduler must do so that requests which kill their core, or its workers, are found and fail alone.

The search itself is `protocol/suspects.py`; here it meets requests and their progress. Lives of a core hand it on in a
black box, under names that frontends keep when they connect again. Starts nothing, and keeps no request waiting that
the scheduler does not know: that is `gate.py`'s part.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.core_proc.recovery.black_box import Legacy
from octavo.core_proc.request import Request, RequestKey, RequestState
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.requests import Submit
from octavo.protocol.suspects import Suspects

logger = logging.getLogger(__name__)

MAX_CONVICTS = 1000
"""Guilty requests that are remembered, until their frontends have come back and been told."""


class Box(Protocol):
    """Where the knowledge survives the process: a `BlackBox`."""

    def expose(self, name: bytes) -> None:
        """From now on this request may be what kills the core."""

    def cover(self, name: bytes) -> None:
        """The request is over, or waits untouched."""

    def expose_only(self, names: Iterable[bytes]) -> None:
        """Cover all others."""

    def save(self, legacy: Legacy) -> None:
        """Keep what is known of suspects."""

    def note_progress(self) -> None:
        """A request has got a token."""

    def note_trial(self, *, is_trying: bool) -> None:
        """Requests are tried apart from now on, or no more."""


class Blame:
    """The requests of one scheduler that were in flight when a core or its workers died.

    Args:
        scheduler: whose requests they are.
        box: written before anything can go wrong.
    """

    def __init__(self, scheduler: Scheduler, box: Box) -> None:
        self.box = box
        self._scheduler = scheduler
        self._suspects: Suspects[bytes] = Suspects()
        self._convicts: dict[bytes, str] = {}
        """Requests that are guilty, and why they fail; the oldest are forgotten first."""
        self._names: dict[RequestKey, bytes] = {}
        """Of every request that was taken in and is not over."""
        self._present: Counter[bytes] = Counter()
        """Requests that are here, taken in or not."""
        self._places: dict[RequestKey, int] = {}
        """Each suspect, and how many outputs it must have to be past the place where the process died."""
        self._allowed: frozenset[bytes] | None = None
        """Who may run; None: all."""
        self._is_stale = False
        """Whether others may be suspects, or here, than when it was last decided who may run."""
        self._has_to_cover = False
        """Whether the black box exposes requests that may not run: steps with them were in flight."""

    @property
    def is_trying(self) -> bool:
        """True while suspects are tried and all others wait."""
        return self._allowed is not None

    def take_core_death(self, legacy: Legacy, exposed: Sequence[bytes], cause: str) -> None:
        """The core before has died; called before anything else.

        Args:
            legacy: what it knew.
            exposed: the requests that may be what killed it.
            cause: how it died.
        """
        self._suspects = Suspects(legacy.suspicion)
        self._convicts = dict(legacy.convicts)
        if (guilty := self._suspects.blame(exposed)) is not None:
            self._convicts[guilty] = f"the engine died each time it came to this request, with no other beside: {cause}"
            self._convicts = dict(list(self._convicts.items())[-MAX_CONVICTS:])
        self._save()

    def verdict(self, name: bytes) -> str | None:
        """Return why a request must fail, None where it need not."""
        return self._convicts.get(name)

    def forget(self, name: bytes) -> None:
        """Somebody new has the name of a request that is over."""
        if name in self._suspects or name in self._convicts:
            self._convicts.pop(name, None)
            self._suspects.clear([name])
            self._is_stale = True
            self._save()

    def arrive(self, name: bytes) -> None:
        """A request is here."""
        self._present[name] += 1
        self._is_stale |= name in self._suspects

    def leave(self, name: bytes) -> None:
        """A request that was here is not any more."""
        self._present[name] -= 1
        if not self._present[name]:
            del self._present[name]
            self._is_stale |= name in self._suspects

    def is_taken_in(self, key: RequestKey) -> bool:
        """Return whether a live request was handed on."""
        return key in self._names

    def may_enter(self, name: bytes) -> bool:
        """Return whether a request may be handed on now; else it must not be touched."""
        return not self._suspects.is_to_be_tried(name) if self._allowed is None else name in self._allowed

    def take_in(self, name: bytes, key: RequestKey, submit: Submit) -> None:
        """A request that is here is about to be handed on."""
        self._names[key] = name
        self.box.expose(name)
        if name in self._suspects:
            num_outputs = len(submit.resume_output_token_ids)
            self._places[key] = num_outputs + (submit.stream_interval if num_outputs else 1)
        if self._allowed is not None:
            self._restrict()

    def release(self, key: RequestKey) -> None:
        """A request that was taken in is over; others are ignored."""
        if (name := self._names.pop(key, None)) is None:
            return
        self.leave(name)
        if name not in self._present:
            self.box.cover(name)
        if self._places.pop(key, None) is not None:
            self._clear([name])

    def take_loss(self, cause: str) -> list[ClientEvent]:
        """The workers are gone: take everything back that they had, and end the request that is guilty, if one is.

        Args:
            cause: how the workers died.
        """
        scheduler = self._scheduler
        parts = [part for record in scheduler.in_flight for part in record.parts]
        live = {part.request.key: part.request for part in parts if part.request.state is not RequestState.FINISHED}
        for key, request in live.items():
            place = request.num_known_outputs + max(1, request.num_pending_tokens)
            self._places[key] = max(place, self._places.get(key, 0))
        scheduler.lose_workers()
        events: list[ClientEvent] = []
        by_name = {self._names[key]: request for key, request in live.items()}
        if (guilty := self._suspects.blame(list(by_name))) is not None:
            client, request_id = key = by_name[guilty].key
            del self._places[key]
            logger.error("request %s of frontend %s kills the workers: it fails", request_id, client.hex())
            events = scheduler.fail(by_name[guilty], f"this request kills the workers that compute it: {cause}")
        self._decide()
        return events

    def review(self) -> None:
        """Clear the suspects that have got past their places, and let run who may run then."""
        if self._places:
            passed = [key for key, place in self._places.items() if self._has_passed(key, place)]
            for key in passed:
                del self._places[key]
            if passed:
                self._clear([self._names[key] for key in passed])
        if self._is_stale:
            self._decide()
        if self._has_to_cover:
            self._cover()

    def _has_passed(self, key: RequestKey, place: int) -> bool:
        request: Request | None = self._scheduler.requests.get(key)
        return request is not None and request.num_known_outputs >= place

    def _clear(self, names: list[bytes]) -> None:
        self._suspects.clear(names)
        self._is_stale = True

    def _decide(self) -> None:
        """Determine who may run, and keep what is known."""
        self._is_stale = False
        allowed = self._suspects.call_up(self._present)
        if allowed is not None and self._allowed is None:
            num_suspects = sum(name in self._suspects for name in self._present)
            logger.warning("%d requests may have killed the engine: they are tried apart", num_suspects)
        if (allowed is None) is not (self._allowed is None):
            self.box.note_trial(is_trying=allowed is not None)
        if allowed != self._allowed:
            self._allowed = allowed
            self._has_to_cover = True
        self._restrict()
        self._save()

    def _restrict(self) -> None:
        allowed = self._allowed
        keys = None if allowed is None else frozenset(key for key, name in self._names.items() if name in allowed)
        if keys != self._scheduler.allowed:
            self._scheduler.restrict(keys)

    def _cover(self) -> None:
        """Have the black box expose those alone that may run, as soon as no step computes others."""
        may_run = self._scheduler.allowed
        parts = (part for record in self._scheduler.in_flight for part in record.parts)
        if may_run is None or all(part.request.key in may_run for part in parts):
            self._has_to_cover = False
            self.box.expose_only(name for key, name in self._names.items() if may_run is None or key in may_run)

    def _save(self) -> None:
        self.box.save(Legacy(self._suspects.state, self._convicts))
