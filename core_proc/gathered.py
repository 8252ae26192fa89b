"""When a frontend is told of a request's tokens: each at once, or several together. Decides nothing about steps.

A message costs the core, the frontend and the system between them more than the token that it carries, and on a machine
that computes with all of its cores every step pays for it. A request says how many tokens its frontend wants together.
"""

from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import TokenId


class Gathered:
    """Tokens of one request that its frontend has not been told of."""

    __slots__ = ("logprobs", "times", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[TokenId] = []
        self.logprobs: list[TokenLogprobs] = []
        """Beside the tokens, of a request that asked for logprobs."""
        self.times: list[float] = []
        """When each token was known, on the core's clock."""

    def add(self, token_id: TokenId, logprob: TokenLogprobs | None, now: float) -> None:
        """Keep a token for later."""
        self.token_ids.append(token_id)
        self.times.append(now)
        if logprob is not None:
            self.logprobs.append(logprob)
