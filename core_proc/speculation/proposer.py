"""`Proposer`: drafts how a request continues."""

from typing import Protocol

from octavo.core_proc.request import Request
from octavo.protocol.ids import IdArray


class Proposer(Protocol):
    """One way of speculating. Deterministic: the same requests, tokens and calls give the same drafts.

    A draft costs microseconds, also for a long request, and a wrong one costs only time: what is delivered is what the
    model samples.
    """

    def propose(self, request: Request, num_tokens: int) -> IdArray | None:
        """Return at most `num_tokens` tokens that may follow the known tokens of a request; None: no draft.

        Called whenever tokens of the request have become known.
        """

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request, which has ended."""


class NoProposer:
    """Leaves all drafts to the grammars of requests."""

    def propose(self, request: Request, num_tokens: int) -> None:
        """See `Proposer.propose`."""

    def forget(self, request: Request) -> None:
        """See `Proposer.forget`."""
