"""`Ledger`: what was asked of the engine, what has been delivered, and what to ask of it again after its death.

No socket, no clock, no text: the link tells it of every message, and sends what it says.
"""

from dataclasses import dataclass, field

import msgspec

from octavo.protocol.events import Finished, RequestEvent, Tokens
from octavo.protocol.ids import RequestId, TokenId
from octavo.protocol.requests import Submit


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

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def add(self, submit: Submit, *, is_sent: bool) -> None:
        """Take in a new request: one that is sent now, or one that `take_unsent` will return."""
        self._entries[submit.request_id] = Entry(submit, is_sent)
        self.num_new += not is_sent

    def remove(self, request_id: RequestId) -> bool:
        """Forget a request; True if the core that lives now must be told."""
        if (entry := self._entries.pop(request_id, None)) is None:
            return False
        self.num_new -= entry.is_new
        return entry.is_sent

    def deliver(self, event: RequestEvent) -> RequestEvent | None:
        """Note an event and return it as its consumer shall see it; None if nobody waits for it any more.

        A request that was resumed shows what the cache had of its prompt when it was new; each resume is a preemption.
        """
        entry = self._entries.get(event.request_id)
        if entry is None:
            return None  # aborted here while the event was on its way
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
        for entry in self._entries.values():
            entry.num_resumes += entry.is_sent
            entry.is_sent = False

    def take_unsent(self) -> list[Submit]:
        """Return what the core that lives now must be asked, oldest first; it counts as sent."""
        submits = []
        for entry in self._entries.values():
            if not entry.is_sent:
                self.num_new -= entry.is_new
                entry.is_sent = True
                submits.append(_again(entry) if entry.num_resumes else entry.submit)
        return submits


def _again(entry: Entry) -> Submit:
    return msgspec.structs.replace(
        entry.submit, resume_output_token_ids=list(entry.output_token_ids), is_continued=True
    )
