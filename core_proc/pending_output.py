"""`PendingOutput`: tokens that are sent together (`stream_interval`).

A message costs more processor time than the token it carries, in the core, the frontend and the kernel. On a CPU every
step pays for it, so a request says how many tokens its frontend wants in one message.
"""

from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import TokenId


class PendingOutput:
    """Tokens of one request that have not been sent."""

    __slots__ = ("logprobs", "times", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[TokenId] = []
        self.logprobs: list[TokenLogprobs] = []
        """One for each token; empty if the request did not ask for logprobs."""
        self.times: list[float] = []
        """When each token was known, on the core's clock."""

    def add(self, token_ids: list[TokenId], logprobs: list[TokenLogprobs], now: float) -> None:
        """Keep tokens for later; `logprobs` is empty if the request did not ask for them."""
        self.token_ids += token_ids
        self.times += [now] * len(token_ids)
        self.logprobs += logprobs
