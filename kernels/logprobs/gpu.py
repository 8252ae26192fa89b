"""`logprobs` on a GPU, in two launches: the first over parts of the rows, the second over the rows.

The first launch finds the normalizer, the rank and the largest value of every block of tokens. The second takes the
most likely tokens one by one, and rescans the block of each. The log-probabilities of a row are never stored.
"""

import torch
from torch import Tensor

from octavo.kernels.filter_logits.gpu_rows import BLOCK, NUM_WARPS, PART, Rows, plain_rows
from octavo.kernels.logprobs.gpu_report import Report, report_part_kernel, report_row_kernel
from octavo.kernels.logprobs.memory import MAX_TOP, RAW, LogprobsMemory
from octavo.kernels.top_k.gpu import top_k_of_rows


def logprobs_of_rows(
    logits_RV: Tensor, token_ids_R: Tensor, top: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `octavo.kernels.logprobs.logprobs_of_rows`."""
    (num_rows, count), device = logits_RV.shape, logits_RV.device
    num_top = min(top, count) if isinstance(top, int) else 0
    is_listed = isinstance(top, int) and num_top <= MAX_TOP
    memory = LogprobsMemory.allocate(num_rows, device)
    per_row = torch.zeros(num_rows, dtype=torch.int32, device=device)
    report = Report(
        modes=per_row + RAW,
        num_top=per_row + (num_top if is_listed else 0),
        raw=logits_RV,
        raw_stride=logits_RV.stride(0),
        token_ids=token_ids_R,
        # The normalizers of processed logits; these logits are raw.
        least_keys=per_row,
        last_ids=per_row,
    )
    report_rows(plain_rows(logits_RV, logits_RV), report, memory, 0.0)
    if is_listed:
        return memory.chosen, memory.ranks, memory.top_ids[:, :num_top], memory.top[:, :num_top]
    top_ids_RK = top_k_of_rows(logits_RV, top) if isinstance(top, int) else top
    top_RK = (logits_RV.gather(1, top_ids_RK).double() - memory.normalizers.unsqueeze(1)).float()
    return memory.chosen, memory.ranks, top_ids_RK, top_RK


def report_rows(rows: Rows, report: Report, memory: LogprobsMemory, ruled_out: float) -> None:
    """Write the log-probabilities of the rows that request them; programs of other rows return at once.

    Args:
        rows: the rows, after the draw.
        report: the reports of the rows, and the drawn tokens.
        memory: has an entry for each row.
        ruled_out: see `draw_filtered`.
    """
    num_parts, num_rows = rows.grid()
    if not num_rows:
        return
    device, num_blocks = rows.logits.device, -(-rows.width // BLOCK)
    largest_RP = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    num_before_RP = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    parts = (largest_RP, torch.empty_like(largest_RP), num_before_RP)
    peaks_RB = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=device)
    report_part_kernel[rows.grid()](
        rows, report, ruled_out, *parts, peaks_RB, PART=PART, BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    report_row_kernel[(num_rows,)](
        rows,
        report,
        ruled_out,
        *parts,
        peaks_RB,
        memory,
        num_parts,
        PARTS=rows.num_parts,
        BLOCKS=rows.num_blocks,
        BLOCK=BLOCK,
        MAX_TOP=MAX_TOP,
        num_warps=NUM_WARPS,
    )
