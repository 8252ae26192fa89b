"""`InFlightRequests`: submitted requests, their delivered outputs, and what to submit again after a crash.

It has no socket, no clock and no text: the link reports every message to it, and sends what it returns.
"""

from dataclasses import dataclass, field
from itertools import islice

import msgspec

from octavo.protocol.events import Finished, RequestEvent, Tokens
from octavo.protocol.ids import RequestId, TokenId, pack_ids
from octavo.protocol.requests import Submit


@dataclass(slots=True)
class InFlightRequest:
    """A live request and its delivered outputs."""

    submit: Submit
    output_token_ids: list[TokenId] = field(default_factory=list)
    """Delivered token ids: the consumer has them or will get them, even if the core dies."""
    num_cached_tokens: int | None = None
    """Number of cached prompt tokens, as reported with the request's first tokens."""
    num_resumes: int = 0
    """Number of times that the request lost its core and was submitted again."""
    num_moves: int = 0
    """Number of times that it was submitted to another engine's core."""
    num_new_tokens: int = 0
    """Estimated number of prompt tokens that the engine has to compute before the first output."""


class InFlightRequests:
    """All live requests of one frontend, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, InFlightRequest] = {}
        self._unsent: dict[RequestId, None] = {}
        """Requests that the current core has not been sent, in order of arrival."""
        self._ending: set[RequestId] = set()
        """Ids of aborted requests that the core has not ended yet: their last events are in transit."""
        self._held: dict[RequestId, None] = {}
        """New requests with such an id. They wait for the end of the old request, or they would get its events."""
        self.num_new = 0
        """Number of requests that were never sent to any core."""
        self.num_pending_tokens = 0
        """Number of prompt tokens that the core has to compute for requests without outputs."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    @property
    def has_unsent(self) -> bool:
        """Whether there are requests that the current core has not been sent."""
        return bool(self._unsent)

    def is_ending(self, request_id: RequestId) -> bool:
        """Return whether the core still has to end an aborted request with this id, so that a new one must wait."""
        return request_id in self._ending

    def add(self, submit: Submit, *, is_sent: bool, num_new_tokens: int = 0) -> None:
        """Add a new request: either it is sent now, or `take_unsent` or `take_held` will return it."""
        entry = self._entries[submit.request_id] = InFlightRequest(submit, num_new_tokens=num_new_tokens)
        self.num_pending_tokens += num_new_tokens
        if not is_sent:
            self._keep(entry)

    def release(self, max_count: int, *, after_crash: bool = True) -> list[InFlightRequest]:
        """Remove requests that another engine can continue, oldest first, and return them.

        A request that has moved before, and whose core died again, stays: it may be the cause of the crashes, and the
        next core of its engine can find that out.

        Args:
            max_count: maximum number of requests to return.
            after_crash: whether the core is gone; otherwise it is told to abort them.
        """
        can_move = (one for one in self._entries.values() if not (one.num_moves and one.num_resumes > one.num_moves))
        released = list(islice(can_move if after_crash else self._entries.values(), max_count))
        for entry in released:
            was_sent = self.abort(entry.submit.request_id)
            if after_crash:
                entry.num_moves += entry.num_resumes > entry.num_moves
            elif was_sent:  # says nothing about the cause of a crash
                entry.num_resumes += 1
                entry.num_moves += bool(entry.num_moves)
        return released

    def adopt(self, entry: InFlightRequest, num_new_tokens: int) -> Submit | None:
        """Add a request of another engine; return what to submit, `None` if a `take_` method returns it."""
        entry.num_new_tokens = 0 if entry.output_token_ids else num_new_tokens
        self._entries[entry.submit.request_id] = entry
        self.num_pending_tokens += entry.num_new_tokens
        if self.has_unsent or self.is_ending(entry.submit.request_id):
            self._keep(entry)
            return None
        return _submission(entry)

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request; return whether the current core must be told to abort it."""
        if must_tell := self.remove(request_id):
            self._ending.add(request_id)
        return must_tell

    def remove(self, request_id: RequestId) -> bool:
        """Forget a request that has ended or whose engine is gone; return whether the current core was sent it."""
        if (entry := self._entries.pop(request_id, None)) is None:
            return False
        self.num_pending_tokens -= entry.num_new_tokens
        if request_id not in self._unsent and request_id not in self._held:
            return True
        self._unsent.pop(request_id, None)
        self._held.pop(request_id, None)
        self.num_new -= not entry.num_resumes
        return False

    def deliver(self, event: RequestEvent) -> RequestEvent | None:
        """Record an event and return it in the form for its consumer. `None` if its request is no longer live.

        A resumed request keeps the number of cached tokens of its first run, and counts each resume as a preemption.
        """
        if self._ending and event.request_id in self._ending:
            if not isinstance(event, Tokens):
                self._ending.remove(event.request_id)
            return None  # the request was aborted while the event was in transit
        entry = self._entries.get(event.request_id)
        if entry is None:
            return None
        if isinstance(event, Tokens):
            entry.output_token_ids += event.token_ids
            if entry.num_new_tokens:
                self.num_pending_tokens -= entry.num_new_tokens
                entry.num_new_tokens = 0
            if entry.num_cached_tokens is None:
                entry.num_cached_tokens = event.num_cached_tokens
            elif entry.num_resumes:
                return msgspec.structs.replace(event, num_cached_tokens=entry.num_cached_tokens)
            return event
        self.remove(event.request_id)
        if isinstance(event, Finished) and entry.num_resumes:
            num_cached_tokens = entry.num_cached_tokens
            return msgspec.structs.replace(
                event,
                num_cached_tokens=event.num_cached_tokens if num_cached_tokens is None else num_cached_tokens,
                num_preemptions=event.num_preemptions + entry.num_resumes,
            )
        return event

    def lose_core(self) -> None:
        """Mark all requests as unsent: the core cannot be reached any more, whether it is dead or not."""
        for request_id, entry in self._entries.items():
            entry.num_resumes += request_id not in self._unsent and request_id not in self._held
        self._unsent = dict.fromkeys(self._entries)
        self._held.clear()
        self._ending.clear()

    def take_unsent(self, max_count: int) -> list[Submit]:
        """Return what must be submitted to the current core, oldest first, at most `max_count`; mark it as sent."""
        submits = []
        for request_id in list(islice(self._unsent, max_count)):
            del self._unsent[request_id]
            entry = self._entries[request_id]
            self.num_new -= not entry.num_resumes
            submits.append(_submission(entry))
        return submits

    def take_held(self, request_id: RequestId) -> Submit | None:
        """Return the request that waited for the end of an earlier one with the same id, and mark it as sent."""
        if request_id not in self._held or self.is_ending(request_id):
            return None
        del self._held[request_id]
        entry = self._entries[request_id]
        self.num_new -= not entry.num_resumes
        return _submission(entry)

    def _keep(self, entry: InFlightRequest) -> None:
        """Keep a request to be sent later."""
        request_id = entry.submit.request_id
        (self._held if self.is_ending(request_id) else self._unsent)[request_id] = None
        self.num_new += not entry.num_resumes


def _submission(entry: InFlightRequest) -> Submit:
    """Return what to send: a request that a core has already had continues after its delivered tokens."""
    if not entry.num_resumes:
        return entry.submit
    return msgspec.structs.replace(
        entry.submit, resume_output_token_ids=pack_ids(entry.output_token_ids), is_continued=True
    )
