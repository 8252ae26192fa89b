"""`Blame`: what a scheduler must do so that requests which kill their workers are found, and fail alone.

The search itself is `protocol/suspects.py`; here it meets requests and their progress. Starts nothing.
"""

import logging

from octavo.core_proc.request import Request, RequestKey, RequestState
from octavo.core_proc.scheduler.scheduler import ClientEvent, Scheduler
from octavo.protocol.suspects import Suspects

logger = logging.getLogger(__name__)


class Blame:
    """The requests of one scheduler that were in flight when workers died."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspects: Suspects[RequestKey] = Suspects()
        self._places: dict[RequestKey, tuple[Request, int]] = {}
        """Each suspect, and how many outputs it must have to be past the place where the workers died."""

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
            self._places[key] = request, max(place, self._places[key][1] if key in self._places else 0)
        scheduler.lose_workers()
        events: list[ClientEvent] = []
        if (guilty := self._suspects.blame(list(live))) is not None:
            del self._places[guilty]
            logger.error("request %s of frontend %s kills the workers: it fails", guilty[1], guilty[0].hex())
            message = f"this request kills the workers that compute it: {cause}"
            events = scheduler.fail(live[guilty], message)
        self._restrict()
        return events

    def review(self) -> None:
        """Clear the suspects that have got past their places, and let run who may run then."""
        if not self._places:
            return
        passed = [key for key, (request, place) in self._places.items() if _has_passed(request, place)]
        if passed:
            for key in passed:
                del self._places[key]
            self._suspects.clear(passed)
            self._restrict()

    def _restrict(self) -> None:
        allowed = self._suspects.allowed
        if allowed == self._scheduler.allowed:
            return
        if allowed is not None and self._scheduler.allowed is None:
            logger.warning("%d requests may have killed the workers: they are tried apart", len(self._places))
        self._scheduler.restrict(allowed)


def _has_passed(request: Request, place: int) -> bool:
    return request.state is RequestState.FINISHED or request.num_known_outputs >= place
