"""`Ledger`: what was asked of the engine, what has been delivered, and what to ask of it again after its death.

No socket, no clock, no text: the link tells it of every message, and sends what it says.
"""

from dataclasses import dataclass, field

import msgspec

from octavo.protocol.events import Failed, FailureKind, Finished, RequestEvent, Tokens
from octavo.protocol.ids import RequestId, TokenId
from octavo.protocol.requests import Submit
from octavo.protocol.suspects import Suspects


@dataclass(slots=True)
class Entry:
    """A live request: what was asked, and what has been delivered."""

    submit: Submit
    is_sent: bool
    """To the core that lives now."""
    output_token_ids: list[TokenId] = field(default_factory=list)
    """Delivered: the consumer has them or will, whatever becomes of the core."""
    num_cached_tokens: int | None = None
    """As the first tokens of the request said it."""
    num_resumes: int = 0
    """Cores that have died with it."""

    @property
    def is_new(self) -> bool:
        """True when no core has been sent it."""
        return not self.is_sent and not self.num_resumes


class Ledger:
    """Every live request of one frontend, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, Entry] = {}
        self.num_new = 0
        """Requests that no core has ever been sent."""
        self._suspects: Suspects[RequestId] = Suspects()
        self._lost: list[RequestId] = []
        """What the core had that was lost last."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    @property
    def is_on_trial(self) -> bool:
        """True while some requests must wait because others may be what kills cores; then events may set more free."""
        return self._suspects.allowed is not None

    def add(self, submit: Submit, *, is_sent: bool) -> None:
        """Take in a new request: one that is sent now, or one that `take_unsent` will return."""
        self._entries[submit.request_id] = Entry(submit, is_sent)
        self.num_new += not is_sent

    def remove(self, request_id: RequestId) -> bool:
        """Forget a request; True if the core that lives now must be told."""
        if (entry := self._entries.pop(request_id, None)) is None:
            return False
        self.num_new -= entry.is_new
        self._suspects.clear([request_id])
        return entry.is_sent

    def deliver(self, event: RequestEvent) -> RequestEvent | None:
        """Note an event and return it as its consumer shall see it; None if nobody waits for it any more.

        A request that was resumed shows what the cache had of its prompt when it was new; each resume is a preemption.
        """
        entry = self._entries.get(event.request_id)
        if entry is None:
            return None  # aborted here while the event was on its way
        if self._suspects:
            self._suspects.clear([event.request_id])
        if isinstance(event, Tokens):
            entry.output_token_ids += event.token_ids
            if entry.num_cached_tokens is None:
                entry.num_cached_tokens = event.num_cached_tokens
            elif entry.num_resumes:
                return msgspec.structs.replace(event, num_cached_tokens=entry.num_cached_tokens)
            return event
        del self._entries[event.request_id]
        if isinstance(event, Finished) and entry.num_resumes:
            num_cached_tokens = entry.num_cached_tokens
            return msgspec.structs.replace(
                event,
                num_cached_tokens=event.num_cached_tokens if num_cached_tokens is None else num_cached_tokens,
                num_preemptions=event.num_preemptions + entry.num_resumes,
            )
        return event

    def lose_core(self) -> None:
        """The core cannot be reached any more: everything has to be sent again, whether it is dead or not."""
        self._lost = [request_id for request_id, entry in self._entries.items() if entry.is_sent]
        for request_id in self._lost:
            self._entries[request_id].is_sent = False
            self._entries[request_id].num_resumes += 1

    def blame(self, cause: str) -> Failed | None:
        """The core that was lost is dead: return the end of the request that is guilty of it, if one is.

        Args:
            cause: of the death, for the message.
        """
        guilty = self._suspects.blame(self._lost)
        self._suspects.clear([request_id for request_id in self._lost if request_id not in self._entries])
        if guilty is None or guilty not in self._entries:
            return None
        del self._entries[guilty]
        message = f"the engine died each time it came to this request, also with no other beside it: {cause}"
        return Failed(guilty, FailureKind.INTERNAL, message)

    def take_unsent(self) -> list[Submit]:
        """Return what the core that lives now must be asked, oldest first; it counts as sent."""
        allowed = self._suspects.allowed
        submits = []
        for request_id, entry in self._entries.items():
            if not entry.is_sent and (allowed is None or request_id in allowed):
                self.num_new -= entry.is_new
                entry.is_sent = True
                submits.append(_again(entry) if entry.num_resumes else entry.submit)
        return submits


def _again(entry: Entry) -> Submit:
    return msgspec.structs.replace(
        entry.submit, resume_output_token_ids=list(entry.output_token_ids), is_continued=True
    )
