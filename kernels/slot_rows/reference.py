"""Reference of `read_slots`, `rewind_rows` and `advance_rows`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.slot_rows import DRAFTED, PENDING


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
    for block_ids_SP, block_table_RP in zip(block_ids, block_tables, strict=True):
        block_table_RP.copy_(block_ids_SP[request_slots_R])
    drafts_T = drafts_KS[(DRAFTED - token_ids_T).clamp(min=0, max=len(drafts_KS) - 1), token_slots_T]
    known_T = torch.where(token_ids_T <= DRAFTED, drafts_T, token_ids_T)
    return torch.where(token_ids_T == PENDING, last_token_S[token_slots_T], known_T)


def rewind_rows(
    sampled_KS: Tensor,
    drafts_KS: Tensor,
    given_KE: Tensor,
    slots_E: Tensor,
    counts_E: Tensor,
    numbers: Sequence[Tensor],
) -> None:
    """See `octavo.kernels.slot_rows.rewind_rows`."""
    on_device_KE = drafts_KS[(DRAFTED - given_KE).clamp(min=0, max=len(drafts_KS) - 1), slots_E]
    drafts_KE = torch.where(given_KE <= DRAFTED, on_device_KE, given_KE)
    is_draft_KE = torch.arange(len(given_KE), device=slots_E.device)[:, None] < counts_E
    is_right_KE = is_draft_KE & (sampled_KS[: len(given_KE), slots_E] == drafts_KE)
    num_wrong_E = counts_E - is_right_KE.long().cumprod(0).sum(0)
    for each in numbers:
        each[: len(slots_E)] -= num_wrong_E


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
    following_R = positions_R + 1
    limits_R = limits_S[slots_R]
    has_room_R = (slot_mapping_R >= 0) & (following_R < limits_R)
    blocks_R = block_ids_SP[slots_R, torch.where(has_room_R, following_R // block_size, 0)].long()
    slot_mapping_R.copy_(torch.where(has_room_R, blocks_R * block_size + following_R % block_size, -1))
    positions_R.copy_(torch.where(has_room_R, following_R, positions_R))
    for numbers_R in draws:
        numbers_R += 1
    return torch.where(limits_R > 0, positions_R + 1, 0)
