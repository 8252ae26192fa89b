"""`sample` on a GPU: the tokens of all rows, without synchronizing with the host.

One pass over all logits changes them and finds the largest of every block of tokens (`gpu_scan.py`). Then the rows with
filters search for their cuts (`octavo.kernels.filter_logits.gpu`), and one launch draws for all rows. Two more launches
report log-probabilities, if requested (`octavo.kernels.logprobs.gpu`). Compilation depends only on the model: the
parameters and lists of requests are read from memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.filter_logits.gpu import draw_filtered, find_cuts
from octavo.kernels.filter_logits.gpu_rows import BLOCK, NUM_WARPS, PART, Rows, new_peaks
from octavo.kernels.logprobs.gpu import report_rows
from octavo.kernels.logprobs.gpu_report import Report
from octavo.kernels.logprobs.memory import LogprobsMemory
from octavo.kernels.sample.gpu_scan import record_kernel, scan_kernel
from octavo.kernels.sample.gpu_timestamps import TIMESTAMP_BLOCK, timestamp_kernel
from octavo.kernels.sample.table import RequestTable


class _Changes(NamedTuple):
    """The columns of a `RequestTable` that change logits. An argument of kernels."""

    lists: Tensor
    num_biases: Tensor
    num_withheld: Tensor
    min_tokens: Tensor
    num_bad: Tensor
    has_penalties: Tensor
    num_seen: Tensor
    penalties: Tensor
    has_mask: Tensor
    allowed: Tensor


def sample_rows(
    logits_RV: Tensor,
    table: RequestTable,
    slots_R: Tensor,
    positions_R: Tensor,
    num_outputs_R: Tensor,
    *,
    largest: float,
    out_R: Tensor | None = None,
    logprobs: LogprobsMemory | None = None,
    raw_RV: Tensor | None = None,
) -> Tensor:
    """See `octavo.kernels.sample.sample_rows`."""
    rows = _scan(logits_RV, table, slots_R, positions_R, num_outputs_R, largest, stores_all=False)
    token_ids_R = torch.empty(len(slots_R), dtype=torch.int64, device=slots_R.device) if out_R is None else out_R
    cuts = draw_filtered(rows, -largest, token_ids_R)
    if logprobs is not None:
        raw_RV = logits_RV if raw_RV is None else raw_RV
        report = Report(
            modes=table.report_S,
            num_top=table.num_top_S,
            raw=raw_RV,
            raw_stride=raw_RV.stride(0),
            token_ids=token_ids_R,
            least_keys=cuts.least_keys_R,
            last_ids=cuts.last_ids_R,
        )
        report_rows(rows, report, logprobs, -largest)
    return token_ids_R


def processed_logits(
    logits_RV: Tensor, table: RequestTable, slots_R: Tensor, num_outputs_R: Tensor, *, largest: float
) -> Tensor:
    """See `octavo.kernels.sample.processed_logits`. Slow: it reads and writes the rows several times."""
    changed_RV = _scan(logits_RV, table, slots_R, slots_R, num_outputs_R, largest, stores_all=True).changed
    temperature_R1 = table.temperature_S[slots_R].unsqueeze(1)
    is_greedy_R1 = temperature_R1 == 0.0
    # Divided like the logits, so that clamped logits compare equal.
    bound_R1 = -torch.full_like(temperature_R1, largest) / temperature_R1.masked_fill(is_greedy_R1, 1.0)
    is_out_RV = changed_RV <= bound_R1
    is_out_RV &= ~is_out_RV.all(dim=1, keepdim=True)
    cuts = find_cuts(changed_RV, table.top_k_S[slots_R], table.top_p_S[slots_R], table.log_min_p_S[slots_R])
    return changed_RV.masked_fill(is_out_RV | ~(cuts.is_kept_RV(changed_RV) | is_greedy_R1), -torch.inf)


def rule_out_text(
    logits_RV: Tensor,
    table: RequestTable,
    rows_M: Tensor,
    slots_M: Tensor,
    num_outputs_M: Tensor,
    *,
    first_timestamp: int,
    largest: float,
) -> None:
    """See `octavo.kernels.sample.rule_out_text`. Copies the rows, because few requests have this rule."""
    changed = _scan(logits_RV[rows_M], table, slots_M, slots_M, num_outputs_M, largest, stores_all=True)
    timestamp_kernel[(len(rows_M),)](
        logits_RV, logits_RV.stride(0), rows_M, changed, first_timestamp, BLOCK=TIMESTAMP_BLOCK
    )


def record_tokens(table: RequestTable, slots_R: Tensor, token_ids_R: Tensor, last_token_S: Tensor) -> None:
    """See `octavo.kernels.sample.record_tokens`."""
    if slots_R.numel():
        record_kernel[(slots_R.numel(),)](_changes_of(table), slots_R, token_ids_R, last_token_S)


def _scan(
    logits_RV: Tensor,
    table: RequestTable,
    slots_R: Tensor,
    positions_R: Tensor,
    num_outputs_R: Tensor,
    largest: float,
    *,
    stores_all: bool,
) -> Rows:
    """Return rows of final logits: float32, changed, and divided by the temperature."""
    num_rows, count = logits_RV.shape
    device = logits_RV.device
    rows = Rows(
        logits=logits_RV,
        changed=torch.empty(num_rows, count, dtype=torch.float32, device=device),
        is_changed=torch.empty(num_rows, dtype=torch.int32, device=device),
        peaks=new_peaks(logits_RV),
        bounds=new_peaks(logits_RV),
        slots=slots_R,
        positions=positions_R,
        temperature=table.temperature_S,
        seed=table.seed_S,
        top_k=table.top_k_S,
        top_p=table.top_p_S,
        log_min_p=table.log_min_p_S,
        stride=logits_RV.stride(0),
        width=count,
    )
    if num_rows:
        scan_kernel[rows.grid()](
            rows,
            _changes_of(table),
            num_outputs_R,
            largest,
            PART=PART,
            BLOCK=BLOCK,
            STORES_ALL=stores_all,
            num_warps=NUM_WARPS,
            # Penalties are defined as separately rounded operations.
            enable_fp_fusion=False,
        )
    return rows


def _changes_of(table: RequestTable) -> _Changes:
    return _Changes(
        lists=table.lists_L2,
        num_biases=table.num_biases_S,
        num_withheld=table.num_withheld_S,
        min_tokens=table.min_tokens_S,
        num_bad=table.num_bad_S,
        has_penalties=table.has_penalties_S,
        num_seen=table.num_seen_S,
        penalties=table.penalties_S3,
        has_mask=table.has_mask_S,
        allowed=table.allowed_SW,
    )
