"""`logprobs` on a GPU: one program per row; the log-probabilities of a row are never stored."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.logprobs.row import RowLogprobs
from octavo.kernels.top_k.gpu import BLOCK, NUM_WARPS, order_key, top_k_of_rows


def logprobs(logits_V: Tensor, token_id: int, top: int | Sequence[int]) -> RowLogprobs:
    """See `octavo.kernels.logprobs.logprobs`; waits for the GPU."""
    token_ids_R = torch.tensor([token_id], dtype=torch.int64, device=logits_V.device)
    given = top if isinstance(top, int) else torch.tensor([[*top]], dtype=torch.int64, device=logits_V.device)
    own_R, rank_R, top_ids_RK, top_RK = logprobs_of_rows(logits_V.unsqueeze(0), token_ids_R, given)
    return RowLogprobs(float(own_R[0]), int(rank_R[0]), top_ids_RK[0].tolist(), top_RK[0].tolist())


def logprobs_of_rows(
    logits_RV: Tensor, token_ids_R: Tensor, top: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `octavo.kernels.logprobs.logprobs_of_rows`."""
    num_rows, count = logits_RV.shape
    normalizer_R1 = torch.empty(num_rows, 1, dtype=torch.float64, device=logits_RV.device)
    rank_R = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
    if num_rows:
        _normalize_kernel[(num_rows,)](
            logits_RV,
            token_ids_R,
            normalizer_R1,
            rank_R,
            logits_RV.stride(0),
            count,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )

    def logprobs_at(ids_RK: Tensor) -> Tensor:
        return (logits_RV.gather(1, ids_RK).double() - normalizer_R1).float()

    top_ids_RK = top_k_of_rows(logits_RV, top) if isinstance(top, int) else top
    return logprobs_at(token_ids_R.unsqueeze(1)).squeeze(1), rank_R, top_ids_RK, logprobs_at(top_ids_RK)


@triton.jit
def _normalize_kernel(logits_ptr, token_ids_ptr, normalizer_ptr, rank_ptr, row_stride, count, BLOCK: tl.constexpr):
    """Write the log-sum-exp of a row, and the rank of its token."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    token_id = tl.load(token_ids_ptr + row)
    own_key = order_key(tl.load(row_ptr + token_id))
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    num_before = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
        keys = order_key(logits)
        is_before = (keys > own_key) | ((keys == own_key) & (ids < token_id))
        num_before += tl.sum((is_before & (ids < count)).to(tl.int32), axis=0)
        largest = tl.maximum(largest, logits)
    top = tl.max(largest, axis=0)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
        total += tl.sum(tl.exp(logits - top), axis=0).to(tl.float64)
    tl.store(normalizer_ptr + row, top.to(tl.float64) + tl.log(total))
    tl.store(rank_ptr + row, num_before + 1)
