"""Reference of `lora`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.lora.shape import LoraPart, LoraShape

Adapter = Sequence[LoraPart | None]
"""Entry for each part of a layer; `None` if the adapter leaves the part unchanged."""


def lora(x_TI: Tensor, y_TO: Tensor, slots: Sequence[int], adapters: Sequence[Adapter], shape: LoraShape) -> Tensor:
    """Add the output of each row's adapter to the row, in float64; slots below zero have no adapter."""
    out_TO = y_TO.double()
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        for part, out_O in zip(adapters[slot], out_TO[row].split(list(shape.parts)), strict=True):
            if part is not None:
                shrunk_R = part.a_RI.double() @ x_TI[row].double()
                out_O += part.scale * (part.b_OR.double() @ shrunk_R)
    return out_TO.to(y_TO.dtype)


def lora_embedding(
    token_ids_T: Tensor, y_TO: Tensor, slots: Sequence[int], adapters: Sequence[Adapter], shape: LoraShape
) -> Tensor:
    """Add the output of each token's adapter to the token's embedding, in float64."""
    one_hot_TV = torch.nn.functional.one_hot(token_ids_T, shape.num_inputs)
    return lora(one_hot_TV, y_TO, slots, adapters, shape)
