"""`causal_conv1d` on the CPU through torch: products and sums of whole rows, which round alike in every row."""

import torch
from torch import Tensor

from octavo.kernels.recurrence import Slots, StateSlots, before


def causal_conv1d(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    state_SKD: Tensor,
    slots: Slots,
    *,
    has_silu: bool,
) -> Tensor:
    """See `octavo.kernels.causal_conv1d.causal_conv1d`."""
    assert isinstance(slots, StateSlots)
    weight_DW = weight_DW.float()
    out_TD = torch.zeros(x_TD.shape) if bias_D is None else bias_D.float().repeat(len(x_TD), 1)
    for rows, source, destination in slots.requests():
        inputs_ID = torch.cat((before(state_SKD, source), x_TD[rows].float()))
        num_rows = rows.stop - rows.start
        for tap in range(weight_DW.shape[1]):
            out_TD[rows] += weight_DW[:, tap] * inputs_ID[tap : tap + num_rows]
        state_SKD[destination] = inputs_ID[num_rows:]
    if has_silu:
        out_TD /= out_TD.neg().exp_().add_(1.0)
    return out_TD.to(x_TD.dtype)
