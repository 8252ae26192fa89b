"""`sample` on a GPU: the tokens of all rows in three launches, without synchronizing with the host.

The first launch changes the logits of each row, in the order that the package documents; the second finds the
thresholds of the filters; the third draws. In each, one program processes one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.filter_logits.gpu import thresholds
from octavo.kernels.gumbel_sample.gpu import draw
from octavo.kernels.penalties.gpu import penalized
from octavo.kernels.sample.table import RequestTable
from octavo.kernels.token_mask.bits import FORBIDDEN
from octavo.kernels.token_mask.gpu import is_allowed
from octavo.kernels.top_k.gpu import BLOCK, NUM_WARPS

_IDS_BLOCK = 256
"""Entries of a list that are processed at a time."""


def sample_rows(
    logits_RV: Tensor,
    table: RequestTable,
    slots_R: Tensor,
    positions_R: Tensor,
    num_outputs_R: Tensor,
    *,
    largest: float,
) -> Tensor:
    """See `octavo.kernels.sample.sample_rows`."""
    changed_RV = change_logits(logits_RV, table, slots_R, num_outputs_R, largest)
    kept = thresholds(changed_RV, table.top_k_S[slots_R], table.top_p_S[slots_R], table.log_min_p_S[slots_R])
    return draw(changed_RV, table.temperature_S[slots_R], table.seed_S[slots_R], positions_R, thresholds=kept)


def processed_logits(
    logits_RV: Tensor, table: RequestTable, slots_R: Tensor, num_outputs_R: Tensor, *, largest: float
) -> Tensor:
    """See `octavo.kernels.sample.processed_logits`. Slow: it reads and writes the rows several times."""
    changed_RV = change_logits(logits_RV, table, slots_R, num_outputs_R, largest)
    temperature_R1 = table.temperature_S[slots_R].unsqueeze(1)
    is_greedy_R1 = temperature_R1 == 0.0
    # Divided as the logits were, so that clamped logits compare equal.
    bound_R1 = -torch.full_like(temperature_R1, largest) / temperature_R1.masked_fill(is_greedy_R1, 1.0)
    is_out_RV = changed_RV <= bound_R1
    is_out_RV &= ~is_out_RV.all(dim=1, keepdim=True)
    least_R, last_R = thresholds(changed_RV, table.top_k_S[slots_R], table.top_p_S[slots_R], table.log_min_p_S[slots_R])
    # The keys of `top_k.order_key` with the first bit flipped, which makes them comparable as signed integers.
    bits_RV = (changed_RV + 0.0).view(torch.int32)
    keys_RV, least_R1 = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF), (least_R ^ -(2**31)).unsqueeze(1)
    ids_V = torch.arange(changed_RV.shape[1], device=changed_RV.device)
    is_kept_RV = (keys_RV > least_R1) | ((keys_RV == least_R1) & (ids_V <= last_R.unsqueeze(1)))
    return changed_RV.masked_fill(is_out_RV | ~(is_kept_RV | is_greedy_R1), -torch.inf)


def change_logits(
    logits_RV: Tensor, table: RequestTable, slots_R: Tensor, num_outputs_R: Tensor, largest: float
) -> Tensor:
    """Return float32 logits before the filters: changed, and divided by the temperature."""
    num_rows, count = logits_RV.shape
    changed_RV = torch.empty(num_rows, count, dtype=torch.float32, device=logits_RV.device)
    if num_rows:
        _change_logits_kernel[(num_rows,)](
            logits_RV,
            changed_RV,
            slots_R,
            num_outputs_R,
            table.temperature_S,
            table.bias_ids_SB,
            table.bias_values_SB,
            table.num_biases_S,
            table.withheld_ids_SE,
            table.num_withheld_S,
            table.min_tokens_S,
            table.bad_ids_SX,
            table.num_bad_S,
            table.has_penalties_S,
            table.seen_ids_SL,
            table.output_counts_SL,
            table.num_seen_S,
            table.penalties_S3,
            table.has_mask_S,
            table.allowed_SW,
            logits_RV.stride(0),
            count,
            largest,
            table.seen_ids_SL.shape[1],
            MAX_BIASES=table.bias_ids_SB.shape[1],
            MAX_WITHHELD=table.withheld_ids_SE.shape[1],
            MAX_BAD=table.bad_ids_SX.shape[1],
            MASK_WORDS=table.allowed_SW.shape[1],
            FORBIDDEN=FORBIDDEN,
            IDS_BLOCK=_IDS_BLOCK,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            # Penalties are defined as separately rounded operations.
            enable_fp_fusion=False,
        )
    return changed_RV


def count_tokens(table: RequestTable, slots_R: Tensor, token_ids_R: Tensor) -> None:
    """See `octavo.kernels.sample.count_tokens`."""
    if slots_R.numel():
        _count_tokens_kernel[(slots_R.numel(),)](
            slots_R,
            token_ids_R,
            table.has_penalties_S,
            table.seen_ids_SL,
            table.output_counts_SL,
            table.num_seen_S,
            table.seen_ids_SL.shape[1],
            IDS_BLOCK=_IDS_BLOCK,
        )


@triton.jit
def _forbid(logits_ptr, ids_ptr, num_ids, IDS_BLOCK: tl.constexpr):
    """Set the logits of a list of tokens to minus infinity."""
    for start in range(0, num_ids, IDS_BLOCK):
        entries = start + tl.arange(0, IDS_BLOCK)
        ids = tl.load(ids_ptr + entries, mask=entries < num_ids, other=0)
        tl.store(logits_ptr + ids, tl.full((IDS_BLOCK,), float("-inf"), tl.float32), mask=entries < num_ids)


@triton.jit
def _penalize(logits_ptr, seen_ptr, counts_ptr, num_seen, penalties_ptr, IDS_BLOCK: tl.constexpr):
    repetition, frequency = tl.load(penalties_ptr), tl.load(penalties_ptr + 1)
    presence = tl.load(penalties_ptr + 2)
    for start in range(0, num_seen, IDS_BLOCK):
        entries = start + tl.arange(0, IDS_BLOCK)
        is_in = entries < num_seen
        ids = tl.load(seen_ptr + entries, mask=is_in, other=0)
        counts = tl.load(counts_ptr + entries, mask=is_in, other=0)
        logits = tl.load(logits_ptr + ids, mask=is_in, other=0.0)
        tl.store(logits_ptr + ids, penalized(logits, counts, repetition, frequency, presence), mask=is_in)


@triton.jit  # long: one kernel, the stages of the sampling table in order
def _change_logits_kernel(
    logits_ptr,
    changed_ptr,
    slots_ptr,
    num_outputs_ptr,
    temperature_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    num_biases_ptr,
    withheld_ids_ptr,
    num_withheld_ptr,
    min_tokens_ptr,
    bad_ids_ptr,
    num_bad_ptr,
    has_penalties_ptr,
    seen_ids_ptr,
    output_counts_ptr,
    num_seen_ptr,
    penalties_ptr,
    has_mask_ptr,
    allowed_ptr,
    row_stride,
    count,
    largest,
    max_seen,
    MAX_BIASES: tl.constexpr,
    MAX_WITHHELD: tl.constexpr,
    MAX_BAD: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    FORBIDDEN: tl.constexpr,
    IDS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    row_ptr = changed_ptr + row * count
    num_biases, num_bad = tl.load(num_biases_ptr + slot), tl.load(num_bad_ptr + slot)
    is_early = tl.load(num_outputs_ptr + row) < tl.load(min_tokens_ptr + slot)
    num_withheld = tl.where(is_early, tl.load(num_withheld_ptr + slot), 0)
    has_penalties, has_mask = tl.load(has_penalties_ptr + slot), tl.load(has_mask_ptr + slot)
    has_lists = (num_biases + num_withheld + num_bad + has_penalties) > 0
    source_ptr = logits_ptr + row * row_stride
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(source_ptr + ids, mask=ids < count, other=0.0).to(tl.float32)
        tl.store(row_ptr + ids, logits, mask=ids < count)
    if has_lists:
        # The lists refer to logits that other threads of this program have written.
        tl.debug_barrier()
        for start in range(0, num_biases, IDS_BLOCK):
            entries = start + tl.arange(0, IDS_BLOCK)
            is_in = entries < num_biases
            ids = tl.load(bias_ids_ptr + slot * MAX_BIASES + entries, mask=is_in, other=0)
            values = tl.load(bias_values_ptr + slot * MAX_BIASES + entries, mask=is_in, other=0.0)
            tl.store(row_ptr + ids, tl.load(row_ptr + ids, mask=is_in, other=0.0) + values, mask=is_in)
        tl.debug_barrier()
        _forbid(row_ptr, withheld_ids_ptr + slot * MAX_WITHHELD, num_withheld, IDS_BLOCK)
        _forbid(row_ptr, bad_ids_ptr + slot * MAX_BAD, num_bad, IDS_BLOCK)
        tl.debug_barrier()
        num_seen = tl.where(has_penalties > 0, tl.load(num_seen_ptr + slot), 0)
        seen_ptr, counts_ptr = seen_ids_ptr + slot * max_seen, output_counts_ptr + slot * max_seen
        _penalize(row_ptr, seen_ptr, counts_ptr, num_seen, penalties_ptr + slot * 3, IDS_BLOCK)
        tl.debug_barrier()
    temperature = tl.load(temperature_ptr + slot)
    is_changed = has_lists | (has_mask > 0)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    if is_changed | (divisor != 1.0):
        # A logit may be read by another thread than the one that wrote it.
        tl.debug_barrier()
        for start in range(0, count, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            logits = tl.load(row_ptr + ids, mask=ids < count, other=0.0)
            # Comparisons keep NaN.
            logits = tl.where(is_changed & (logits > largest), largest, logits)
            logits = tl.where(is_changed & (logits < -largest), -largest, logits)
            is_masked = (ids < count) & (has_mask > 0)
            allowed = is_allowed(allowed_ptr + slot * MASK_WORDS, ids, is_masked)
            logits = tl.where(is_masked & (allowed == 0), FORBIDDEN, logits)
            tl.store(row_ptr + ids, tl.div_rn(logits, divisor + tl.zeros_like(logits)), mask=ids < count)


@triton.jit
def _count_tokens_kernel(
    slots_ptr,
    token_ids_ptr,
    has_penalties_ptr,
    seen_ids_ptr,
    output_counts_ptr,
    num_seen_ptr,
    max_seen,
    IDS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token_id = tl.load(token_ids_ptr + row).to(tl.int32)
    if (tl.load(has_penalties_ptr + slot) > 0) & (token_id >= 0):
        num_seen = tl.load(num_seen_ptr + slot)
        place = num_seen
        for start in range(0, num_seen, IDS_BLOCK):
            entries = start + tl.arange(0, IDS_BLOCK)
            seen = tl.load(seen_ids_ptr + slot * max_seen + entries, mask=entries < num_seen, other=-1)
            place = tl.minimum(place, tl.min(tl.where(seen == token_id, entries, num_seen), axis=0))
        if place < max_seen:
            is_new = place == num_seen
            before = tl.load(output_counts_ptr + slot * max_seen + place)
            tl.store(seen_ids_ptr + slot * max_seen + place, token_id)
            tl.store(output_counts_ptr + slot * max_seen + place, tl.where(is_new, 0, before) + 1)
            tl.store(num_seen_ptr + slot, num_seen + is_new.to(tl.int32))
