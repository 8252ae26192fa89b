"""What `read_slots` means."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.slot_rows import PENDING


def read_slots(
    token_ids_T: Tensor,
    token_slots_T: Tensor,
    last_token_S: Tensor,
    request_slots_R: Tensor,
    block_ids: Sequence[Tensor],
    block_tables: Sequence[Tensor],
) -> Tensor:
    """See `octavo.kernels.slot_rows.read_slots`."""
    for block_ids_SP, block_table_RP in zip(block_ids, block_tables, strict=True):
        block_table_RP.copy_(block_ids_SP[request_slots_R])
    return torch.where(token_ids_T == PENDING, last_token_S[token_slots_T], token_ids_T)
