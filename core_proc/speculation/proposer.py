"""`Proposer`: drafts how a request continues."""

from typing import Protocol

from octavo.core_proc.request import Request
from octavo.protocol.ids import IdArray


class Proposer(Protocol):
    """One method of speculation. Deterministic: the same requests, tokens and calls give the same drafts.

    A draft costs microseconds, even for a long request. A wrong draft only costs time: the delivered tokens are those
    that the model samples.
    """

    def propose(self, request: Request, num_tokens: int) -> IdArray | None:
        """Return at most `num_tokens` tokens that may follow the known tokens of a request. Return None for no draft.

        Called whenever tokens of the request have become known.
        """

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""


class NoProposer:
    """Proposes nothing: all drafts come from the grammars of requests."""

    def propose(self, request: Request, num_tokens: int) -> None:
        """See `Proposer.propose`."""

    def forget(self, request: Request) -> None:
        """See `Proposer.forget`."""
