"""One row at a time, so that no other row can have a say in its bits."""

import torch
from torch import Tensor

from octavo.kernels.logprobs.row import RowLogprobs
from octavo.kernels.top_k import top_k


def logprobs(logits_V: Tensor, token_id: int, num_top: int) -> RowLogprobs:
    """See the contract in the package."""
    logprobs_V = torch.log_softmax(logits_V, 0)
    own = logprobs_V[token_id]
    num_above = int((logprobs_V > own).sum()) + int((logprobs_V[:token_id] == own).sum())
    top = top_k(logprobs_V, num_top) if num_top else torch.empty(0, dtype=torch.int64)
    return RowLogprobs(
        token_logprob=float(own),
        rank=num_above + 1,
        top_token_ids=top.tolist(),
        top_logprobs=logprobs_V[top].tolist(),
    )
