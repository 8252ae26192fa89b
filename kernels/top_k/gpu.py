"""`top_k` on a GPU: the filter of `filter_logits` finds what is kept, and only that is sorted."""

import math

import torch
from torch import Tensor

from octavo.kernels.filter_logits.gpu import find_cuts

_MAX_LISTED = 4096
"""Above this number of values, complete rows are sorted, as for the log-probabilities of the whole vocabulary."""


def top_k_of_rows(values_RV: Tensor, k: int) -> Tensor:
    """Return the int64 indices of the `k` largest values of every row, as `top_k` does; does not synchronize."""
    num_rows, count = values_RV.shape
    k = min(k, count)
    if k == count or k > _MAX_LISTED:
        # Both zeros are equal, to any algorithm that sorts by bits too.
        return (values_RV + 0.0).argsort(dim=1, descending=True, stable=True)[:, :k]
    device = values_RV.device
    if not num_rows or not k:
        return torch.empty(num_rows, k, dtype=torch.int64, device=device)
    cuts = find_cuts(
        values_RV,
        torch.full((num_rows,), k, dtype=torch.int32, device=device),
        torch.ones(num_rows, dtype=torch.float64, device=device),
        torch.full((num_rows,), -math.inf, dtype=torch.float32, device=device),
    )
    ids_RK = cuts.first(k)
    order_RK = values_RV.gather(1, ids_RK).argsort(dim=1, descending=True, stable=True)
    return ids_RK.gather(1, order_RK)
