"""`read_slots` on a GPU: some programs for the tokens, and one for each request."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.slot_rows import PENDING

_BLOCK = 1024
_PENDING = tl.constexpr(PENDING)


def read_slots(
    token_ids_T: Tensor,
    token_slots_T: Tensor,
    last_token_S: Tensor,
    request_slots_R: Tensor,
    block_ids: Sequence[Tensor],
    block_tables: Sequence[Tensor],
) -> Tensor:
    """See `octavo.kernels.slot_rows.read_slots`."""
    out_T = torch.empty_like(token_ids_T)
    num_programs = triton.cdiv(len(out_T), _BLOCK) + len(request_slots_R)
    if num_programs:
        _read_slots_kernel[(num_programs,)](
            token_ids_T,
            token_slots_T,
            last_token_S,
            out_T,
            len(out_T),
            request_slots_R,
            tuple(block_ids),
            tuple(block_tables),
            tuple(each.stride(0) for each in block_ids),
            tuple(each.stride(0) for each in block_tables),
            tuple(each.shape[1] for each in block_tables),
            NUM_GROUPS=len(block_tables),
            BLOCK=_BLOCK,
        )
    return out_T


@triton.jit(do_not_specialize=["num_tokens"])
def _read_slots_kernel(
    token_ids_ptr,
    token_slots_ptr,
    last_token_ptr,
    out_ptr,
    num_tokens,
    request_slots_ptr,
    block_ids,
    block_tables,
    id_strides,
    table_strides,
    widths,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_token_programs = tl.cdiv(num_tokens, BLOCK)
    row = (tl.program_id(0) - num_token_programs).to(tl.int64)
    if row < 0:
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_token = tokens < num_tokens
        given = tl.load(token_ids_ptr + tokens, mask=is_token, other=0)
        is_unknown = is_token & (given == _PENDING)
        slots = tl.load(token_slots_ptr + tokens, mask=is_unknown, other=0)
        last = tl.load(last_token_ptr + slots, mask=is_unknown, other=0)
        tl.store(out_ptr + tokens, tl.where(is_unknown, last, given), mask=is_token)
    else:
        slot = tl.load(request_slots_ptr + row)
        for group in tl.static_range(NUM_GROUPS):
            for start in range(0, widths[group], BLOCK):
                columns = start + tl.arange(0, BLOCK)
                is_column = columns < widths[group]
                ids = tl.load(block_ids[group] + slot * id_strides[group] + columns, mask=is_column, other=0)
                tl.store(block_tables[group] + row * table_strides[group] + columns, ids, mask=is_column)
