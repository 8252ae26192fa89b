"""`latent_heads` in C++: its arguments, mirrored from `native.h`."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.latent_heads.widths import LatentWidths
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, Value, as_tensor, value_of


class LatentHeadsArguments(Arguments):
    """See `LatentHeadsArgs`."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "q_latent", "latent", "k_rotary", "cos", "sin", "q_out", "k_out")),
        *((name, ctypes.c_int64) for name in ("plain", "rotary", "latent_width", "is_interleaved")),
    )


def arguments(inputs: Sequence[Matrix], outputs: Sequence[Matrix], widths: LatentWidths) -> LatentHeadsArguments:
    """Return the arguments: the inputs in the order of `latent_heads`; queries and keys."""
    sizes = widths.plain, widths.rotary, widths.latent
    return LatentHeadsArguments(*inputs, *outputs, *sizes, int(widths.is_interleaved))


def record(
    q_TNP: Tensor,
    q_latent_TM: Tensor,
    latent_TL: Tensor,
    k_rotary_TR: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    widths: LatentWidths,
) -> tuple[Tensor, Tensor]:
    """Record the queries and keys."""
    inputs = [value_of(tensor) for tensor in (q_TNP, q_latent_TM, latent_TL, k_rotary_TR, cos_TC, sin_TC)]
    recorder, num_heads = inputs[0].recorder, q_TNP.shape[1]
    queries, keys = Buffer(num_heads * widths.key), Buffer(widths.key)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return arguments(inputs, outputs, widths)

    recorder.append_effect(Node("latent_heads", inputs, [queries, keys], bind, is_row_wise=True))
    return (
        as_tensor(Value(recorder, queries, 0, (num_heads, widths.key))),
        as_tensor(Value(recorder, keys, 0, (1, widths.key))),
    )
