"""`PendingOutput`: tokens that are sent together (`stream_interval`).

A message costs more CPU time than the token it carries, in the core, the frontend and the kernel. On a CPU engine every
step pays for it, so each request says how many tokens to send per message.
"""

from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import TokenId


class PendingOutput:
    """Unsent tokens of one request."""

    __slots__ = ("logprobs", "times", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[TokenId] = []
        self.logprobs: list[TokenLogprobs] = []
        """One entry per token. Empty if the request has not requested logprobs."""
        self.times: list[float] = []
        """When each token became known, on the core's clock."""

    def add(self, token_ids: list[TokenId], logprobs: list[TokenLogprobs], now: float) -> None:
        """Add tokens to send later. `logprobs` is empty if not requested."""
        self.token_ids += token_ids
        self.times += [now] * len(token_ids)
        self.logprobs += logprobs
