"""Reference of `causal_conv1d`, for one sequence from its beginning."""

import torch
from torch import Tensor


def causal_conv1d(x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, *, has_silu: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs in float64 and the last W - 1 inputs."""
    width = weight_DW.shape[1]
    padded_ID = torch.cat((x_TD.new_zeros(width - 1, x_TD.shape[1]), x_TD)).double()
    out_DT = torch.nn.functional.conv1d(
        padded_ID.t(),
        weight_DW.double().unsqueeze(1),
        None if bias_D is None else bias_D.double(),
        groups=len(weight_DW),
    )
    out_TD = out_DT.t()
    return (torch.nn.functional.silu(out_TD) if has_silu else out_TD), padded_ID[len(x_TD) :]
