"""`logprobs` on a GPU: all parts of a row at work; the log-probabilities of a row are never stored."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.filter_logits.gpu_rows import NUM_WARPS, PART
from octavo.kernels.logprobs.row import RowLogprobs
from octavo.kernels.top_k.gpu import top_k_of_rows
from octavo.kernels.top_k.gpu_order import order_key


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
    num_parts, device = triton.cdiv(count, PART), logits_RV.device
    largest_RP = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    sums_RP = torch.empty_like(largest_RP)
    num_before_RP = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    normalizer_R1 = torch.empty(num_rows, 1, dtype=torch.float64, device=device)
    rank_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows:
        parts = (largest_RP, sums_RP, num_before_RP)
        _sum_part_kernel[num_parts, num_rows](
            logits_RV, token_ids_R, *parts, logits_RV.stride(0), count, PART=PART, num_warps=NUM_WARPS
        )
        _normalize_kernel[(num_rows,)](
            *parts, normalizer_R1, rank_R, num_parts, PARTS=triton.next_power_of_2(num_parts), num_warps=1
        )

    def logprobs_at(ids_RK: Tensor) -> Tensor:
        return (logits_RV.gather(1, ids_RK).double() - normalizer_R1).float()

    top_ids_RK = top_k_of_rows(logits_RV, top) if isinstance(top, int) else top
    return logprobs_at(token_ids_R.unsqueeze(1)).squeeze(1), rank_R, top_ids_RK, logprobs_at(top_ids_RK)


@triton.jit
def _sum_part_kernel(
    logits_ptr, token_ids_ptr, largest_ptr, sums_ptr, num_before_ptr, row_stride, count, PART: tl.constexpr
):
    """Store the largest logit of a part, the sum of exponentials below it, and how many tokens precede the row's."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    token_id = tl.load(token_ids_ptr + row)
    own_key = order_key(tl.load(row_ptr + token_id))
    ids = part * PART + tl.arange(0, PART)
    logits = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
    keys = order_key(logits)
    is_before = ((keys > own_key) | ((keys == own_key) & (ids < token_id))) & (ids < count)
    largest = tl.max(logits, axis=0)
    # A part of minus infinities has a sum of 0.
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    place = row * tl.num_programs(0) + part
    tl.store(largest_ptr + place, largest)
    tl.store(sums_ptr + place, tl.sum(tl.exp(logits - shift), axis=0))
    tl.store(num_before_ptr + place, tl.sum(is_before.to(tl.int32), axis=0))


@triton.jit
def _normalize_kernel(largest_ptr, sums_ptr, num_before_ptr, normalizer_ptr, rank_ptr, num_parts, PARTS: tl.constexpr):
    """Write the log-sum-exp of a row, and the rank of its token."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    is_in, places = parts < num_parts, row * num_parts + parts
    largest = tl.load(largest_ptr + places, mask=is_in, other=float("-inf"))
    sums = tl.load(sums_ptr + places, mask=is_in, other=0.0).to(tl.float64)
    top = tl.max(largest, axis=0)
    total = tl.sum(sums * tl.exp(largest - top).to(tl.float64), axis=0)
    tl.store(normalizer_ptr + row, top.to(tl.float64) + tl.log(total))
    tl.store(rank_ptr + row, tl.sum(tl.load(num_before_ptr + places, mask=is_in, other=0), axis=0) + 1)
