"""`logprobs` on the CPU: one row at a time, so that its bits cannot depend on other rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.logprobs.row import RowLogprobs
from octavo.kernels.top_k import top_k


def logprobs(logits_V: Tensor, token_id: int, top: int | Sequence[int]) -> RowLogprobs:
    """See the contract in the package."""
    logprobs_V = torch.log_softmax(logits_V, 0)
    own = logprobs_V[token_id]
    num_above = int((logprobs_V > own).sum()) + int((logprobs_V[:token_id] == own).sum())
    if isinstance(top, int):
        top_ids = top_k(logprobs_V, top) if top else torch.empty(0, dtype=torch.int64)
    else:
        top_ids = torch.tensor(top, dtype=torch.int64)
    return RowLogprobs(
        token_logprob=float(own),
        rank=num_above + 1,
        top_token_ids=top_ids.tolist(),
        top_logprobs=logprobs_V[top_ids].tolist(),
    )
