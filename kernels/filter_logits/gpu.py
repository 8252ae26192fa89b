"""`filter_logits` on a GPU, without sorting, in five launches for all rows. Programs of rows without filters return at
once.

The first launch bounds the cut of each row. Two launches narrow it down and one collects the candidates
(`gpu_narrow.py`). The last launch finds the exact cut (`gpu_select.py`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.filter_logits.gpu_narrow import CAPACITY, EDGES, STATE, begin_kernel, collect_kernel, narrow_kernel
from octavo.kernels.filter_logits.gpu_rows import BLOCK, NUM_WARPS, PART, Rows, plain_rows
from octavo.kernels.filter_logits.gpu_select import list_kernel, select_kernel
from octavo.kernels.gumbel_sample.gpu import draw_kernel


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """The cuts of the filters in each row: see `octavo.kernels.top_k.gpu_order.is_kept`."""

    rows: Rows
    state_RS: Tensor
    """int64; the final state of each search."""
    candidate_keys_RC: Tensor
    """int32, order keys as bits."""
    candidate_ids_RC: Tensor
    """int32, ascending."""
    least_keys_R: Tensor
    """int32, the smallest kept order key, as bits."""
    last_ids_R: Tensor
    """int32, the last kept index among equal keys."""

    def is_kept_RV(self, logits_RV: Tensor) -> Tensor:
        """Return which logits are kept; `logits_RV` are the final ones, float32."""
        # Order keys with the first bit flipped, so that they compare as signed integers.
        bits_RV = (logits_RV + 0.0).view(torch.int32)
        keys_RV, least_R1 = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF), (self.least_keys_R ^ -(2**31)).unsqueeze(1)
        ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
        return (keys_RV > least_R1) | ((keys_RV == least_R1) & (ids_V <= self.last_ids_R.unsqueeze(1)))

    def first(self, max_kept: int) -> Tensor:
        """Return the int64 indices, ascending, of `max_kept` kept logits of every row; no row may keep fewer."""
        num_rows = len(self.least_keys_R)
        ids_RK = torch.empty(num_rows, max_kept, dtype=torch.int64, device=self.state_RS.device)
        list_kernel[(num_rows,)](
            self.rows,
            self.state_RS,
            self.candidate_keys_RC,
            self.candidate_ids_RC,
            self.least_keys_R,
            self.last_ids_R,
            ids_RK,
            max_kept,
            num_warps=NUM_WARPS,
        )
        return ids_RK


def find_cuts(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, log_min_p_R: Tensor) -> Cuts:
    """Return the cuts of the filters for rows of final logits. Undefined for a row whose largest logit is not finite.

    Args:
        logits_RV: float32, divided by the temperature; rows are contiguous.
        top_k_R: int32; 0 keeps all.
        top_p_R: float64, like the sums it is compared with; 1 keeps all.
        log_min_p_R: float32, logarithm of min_p; minus infinity keeps all.
    """
    num_rows, count = logits_RV.shape
    peaks_RB = functional.pad(logits_RV, (0, -count % BLOCK), value=-math.inf).view(num_rows, -1, BLOCK).amax(2)
    rows = plain_rows(logits_RV, peaks_RB)._replace(top_k=top_k_R, top_p=top_p_R, log_min_p=log_min_p_R)
    return _search(rows, -math.inf, draws=False)


def draw_filtered(rows: Rows, ruled_out: float, token_ids_R: Tensor) -> Cuts:
    """Write the token of every row; -1 if a logit is NaN or plus infinity, or no logit is finite.

    Args:
        rows: the rows, with peaks for rows that have filters, and bounds for rows that have none.
        ruled_out: if a request changes logits, a logit at or below this, divided by its temperature, rules a token out.
        token_ids_R: int64, overwritten.
    """
    num_rows = rows.logits.shape[0]
    cuts = _search(rows, ruled_out, draws=True)
    if num_rows:
        draw_kernel[(num_rows,)](
            rows,
            cuts.least_keys_R,
            cuts.last_ids_R,
            token_ids_R,
            BLOCKS=rows.num_blocks,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return cuts


def _search(rows: Rows, ruled_out: float, *, draws: bool) -> Cuts:
    """Find the cuts of all rows. With `draws`, also store the bounds of rows with filters."""
    num_parts, num_rows = rows.grid()
    device = rows.logits.device
    state_3RS = torch.empty(3, num_rows, STATE, dtype=torch.int64, device=device)
    sums_2RPE = torch.empty(2, num_rows, num_parts, EDGES, dtype=torch.int64, device=device)
    keys_RC = torch.empty(num_rows, CAPACITY, dtype=torch.int32, device=device)
    ids_RC = torch.empty_like(keys_RC)
    least_keys_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    last_ids_R = torch.empty_like(least_keys_R)
    cuts = Cuts(rows, state_3RS[2], keys_RC, ids_RC, least_keys_R, last_ids_R)
    if not num_rows:
        return cuts
    first, second, third = state_3RS
    sums, next_sums = sums_2RPE
    blocks = {"BLOCKS": rows.num_blocks, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
    parts = {"PARTS": rows.num_parts, "PART": PART, "BLOCK": BLOCK, "num_warps": 4}
    # Weights are defined as separately rounded operations.
    weighing = {"enable_fp_fusion": False}
    grid = rows.grid()
    begin_kernel[(num_rows,)](rows, first, ruled_out, **blocks)
    narrow_kernel[grid](rows, first, sums, first, sums, IS_FIRST=True, **parts, **weighing)
    narrow_kernel[grid](rows, first, sums, second, next_sums, IS_FIRST=False, **parts, **weighing)
    collect_kernel[grid](rows, second, next_sums, third, keys_RC, ids_RC, DRAWS=draws, **parts)
    kept = (least_keys_R, last_ids_R)
    select_kernel[(num_rows,)](rows, third, keys_RC, ids_RC, *kept, num_warps=NUM_WARPS, **weighing)
    return cuts
