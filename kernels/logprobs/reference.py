"""Reference of `logprobs`, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.logprobs.row import RowLogprobs


def logprobs(logits_V: Tensor, token_id: int, top: int | Sequence[int]) -> RowLogprobs:
    """See the contract in the package."""
    logits = logits_V.double()
    logprobs_V = logits - logits.logsumexp(0)
    order = logits.argsort(descending=True, stable=True)
    top_ids = order[:top] if isinstance(top, int) else torch.tensor(top, dtype=torch.int64)
    return RowLogprobs(
        token_logprob=float(logprobs_V[token_id]),
        rank=order.tolist().index(token_id) + 1,
        top_token_ids=top_ids.tolist(),
        top_logprobs=logprobs_V[top_ids].tolist(),
    )
