"""`read_slots`, `rewind_rows` and `advance_rows` on a GPU."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.slot_rows import DRAFTED, PENDING

_BLOCK = 1024
_ROWS = 128
_PENDING = tl.constexpr(PENDING)
_DRAFTED = tl.constexpr(DRAFTED)


def read_slots(
    token_ids_T: Tensor,
    token_slots_T: Tensor,
    last_token_S: Tensor,
    drafts_KS: Tensor,
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
            drafts_KS,
            len(last_token_S),
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


@triton.jit(do_not_specialize=["num_slots", "num_tokens"])
def _read_slots_kernel(
    token_ids_ptr,
    token_slots_ptr,
    last_token_ptr,
    drafts_ptr,
    num_slots,
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
    """The first programs replace the placeholders of BLOCK tokens each. Each further one copies the block ids of a
    request."""
    num_token_programs = tl.cdiv(num_tokens, BLOCK)
    row = (tl.program_id(0) - num_token_programs).to(tl.int64)
    if row < 0:
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_token = tokens < num_tokens
        given = tl.load(token_ids_ptr + tokens, mask=is_token, other=0)
        is_pending, is_drafted = is_token & (given == _PENDING), is_token & (given <= _DRAFTED)
        slots = tl.load(token_slots_ptr + tokens, mask=is_pending | is_drafted, other=0)
        last = tl.load(last_token_ptr + slots, mask=is_pending, other=0)
        draft = tl.load(drafts_ptr + (_DRAFTED - given) * num_slots + slots, mask=is_drafted, other=0)
        token_ids = tl.where(is_pending, last, tl.where(is_drafted, draft, given))
        tl.store(out_ptr + tokens, token_ids, mask=is_token)
    else:
        slot = tl.load(request_slots_ptr + row)
        for group in tl.static_range(NUM_GROUPS):
            for start in range(0, widths[group], BLOCK):
                columns = start + tl.arange(0, BLOCK)
                is_column = columns < widths[group]
                ids = tl.load(block_ids[group] + slot * id_strides[group] + columns, mask=is_column, other=0)
                tl.store(block_tables[group] + row * table_strides[group] + columns, ids, mask=is_column)


def rewind_rows(
    sampled_KS: Tensor,
    drafts_KS: Tensor,
    given_KE: Tensor,
    slots_E: Tensor,
    counts_E: Tensor,
    numbers: Sequence[Tensor],
) -> None:
    """See `octavo.kernels.slot_rows.rewind_rows`."""
    if not len(slots_E):
        return
    _rewind_rows_kernel[(triton.cdiv(len(slots_E), _ROWS),)](
        sampled_KS,
        drafts_KS,
        sampled_KS.shape[1],
        given_KE,
        len(given_KE),
        slots_E,
        counts_E,
        tuple(numbers),
        len(slots_E),
        NUM_NUMBERS=len(numbers),
        ROWS=_ROWS,
    )


@triton.jit(do_not_specialize=["num_slots", "most_drafts", "num_rows"])
def _rewind_rows_kernel(
    sampled_ptr,
    drafts_ptr,
    num_slots,
    given_ptr,
    most_drafts,
    slots_ptr,
    counts_ptr,
    numbers,
    num_rows,
    NUM_NUMBERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program counts the drafts of ROWS requests from the first wrong one on, and subtracts the counts from
    `numbers`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=0)
    counts = tl.load(counts_ptr + rows, mask=is_row, other=0)
    num_wrong, is_right = counts, is_row
    for place in range(most_drafts):
        is_right = is_right & (place < counts)
        given = tl.load(given_ptr + place * num_rows + rows, mask=is_right, other=0)
        is_drafted = is_right & (given <= _DRAFTED)
        draft = tl.load(drafts_ptr + (_DRAFTED - given) * num_slots + slots, mask=is_drafted, other=0)
        sampled = tl.load(sampled_ptr + place * num_slots + slots, mask=is_right, other=0)
        is_right = is_right & (sampled == tl.where(is_drafted, draft, given))
        num_wrong -= is_right.to(tl.int64)
    for index in tl.static_range(NUM_NUMBERS):
        numbers_ptr = numbers[index] + rows
        tl.store(numbers_ptr, tl.load(numbers_ptr, mask=is_row, other=0) - num_wrong, mask=is_row)


def advance_rows(
    positions_R: Tensor,
    slot_mapping_R: Tensor,
    slots_R: Tensor,
    limits_S: Tensor,
    block_ids_SP: Tensor,
    block_size: int,
    draws: Sequence[Tensor],
) -> Tensor:
    """See `octavo.kernels.slot_rows.advance_rows`."""
    context_lens_R = torch.empty_like(positions_R)
    _advance_rows_kernel[(triton.cdiv(len(positions_R), _ROWS),)](
        positions_R,
        slot_mapping_R,
        slots_R,
        limits_S,
        block_ids_SP,
        block_ids_SP.stride(0),
        block_size,
        tuple(draws),
        context_lens_R,
        len(positions_R),
        NUM_DRAWS=len(draws),
        ROWS=_ROWS,
    )
    return context_lens_R


@triton.jit(do_not_specialize=["id_stride", "block_size", "num_rows"])
def _advance_rows_kernel(
    positions_ptr,
    slot_mapping_ptr,
    slots_ptr,
    limits_ptr,
    block_ids_ptr,
    id_stride,
    block_size,
    draws,
    context_lens_ptr,
    num_rows,
    NUM_DRAWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program advances ROWS requests by one position. A request stays where it is if the next position has no room
    or its present one is not stored."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=0)
    positions = tl.load(positions_ptr + rows, mask=is_row, other=0)
    following = positions + 1
    is_stored = tl.load(slot_mapping_ptr + rows, mask=is_row, other=-1) >= 0
    limits = tl.load(limits_ptr + slots, mask=is_row, other=0)
    has_room = is_row & is_stored & (following < limits)
    block_ptr = block_ids_ptr + slots * id_stride + following // block_size
    blocks = tl.load(block_ptr, mask=has_room, other=0).to(tl.int64)
    places = tl.where(has_room, blocks * block_size + following % block_size, -1)
    tl.store(slot_mapping_ptr + rows, places, mask=is_row)
    positions = tl.where(has_room, following, positions)
    tl.store(positions_ptr + rows, positions, mask=is_row)
    tl.store(context_lens_ptr + rows, tl.where(limits > 0, positions + 1, 0), mask=is_row)
    for index in tl.static_range(NUM_DRAWS):
        numbers_ptr = draws[index] + rows
        tl.store(numbers_ptr, tl.load(numbers_ptr, mask=is_row, other=0) + 1, mask=is_row)
