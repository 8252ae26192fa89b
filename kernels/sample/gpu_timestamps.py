"""The timestamp rule on a GPU: one program reads one row, always in the same order."""

import triton
import triton.language as tl

from octavo.kernels.filter_logits.gpu_rows import divisor_of
from octavo.kernels.token_mask.bits import FORBIDDEN

TIMESTAMP_BLOCK = 4096
"""Tokens that a program reads at a time."""

_FORBIDDEN = tl.constexpr(FORBIDDEN)


@triton.jit(do_not_specialize=["first_timestamp"])
def timestamp_kernel(logits_ptr, stride, rows_ptr, changed, first_timestamp, BLOCK: tl.constexpr):
    """Rule out the text tokens of a row if its timestamps together are likelier than the likeliest text token.

    Args:
        logits_ptr: logits of all rows.
        stride: elements from one row to the next.
        rows_ptr: row of each program.
        changed: `Rows` with the final logits of each program's row, divided by the temperature.
        first_timestamp: tokens before it are text.
        BLOCK: tokens that are read at a time.
    """
    program = tl.program_id(0)
    row = tl.load(rows_ptr + program)
    changed_ptr = changed.changed + program.to(tl.int64) * changed.width
    ids = tl.arange(0, BLOCK)
    likeliest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, first_timestamp, BLOCK):
        is_in = start + ids < first_timestamp
        likeliest = tl.maximum(likeliest, tl.load(changed_ptr + start + ids, mask=is_in, other=float("-inf")))
    largest, temperature = tl.max(likeliest), divisor_of(changed, tl.load(changed.slots + program))
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(first_timestamp, changed.width, BLOCK):
        is_in = start + ids < changed.width
        logits = tl.load(changed_ptr + start + ids, mask=is_in, other=float("-inf"))
        sums += tl.exp((logits - largest) * temperature)
    if tl.sum(sums) > 1.0:
        forbidden = tl.full((BLOCK,), _FORBIDDEN, tl.float32)
        for start in range(0, first_timestamp, BLOCK):
            tl.store(logits_ptr + row * stride + start + ids, forbidden, mask=start + ids < first_timestamp)
