"""Products of the heads of each row with weights of their own: multi-head latent attention needs two of them."""

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.head_linear import cpu, native
from octavo.kernels.linear import PackedLinear

_IMPLEMENTATIONS = {
    "cpu": cpu.head_linear,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.head_linear.gpu", cpu.head_linear),
}


def head_linear(x_TNS: Tensor, heads: Sequence[PackedLinear]) -> Tensor:
    """Return the outputs of all heads side by side, in the dtype of `x`.

    A head's product is that of `octavo.kernels.linear.linear` with its weight; a row has the same bits in any batch.

    Args:
        x_TNS: rows of heads, of which the first columns are multiplied, as many as the weights have inputs.
        heads: the weights, all of one shape, not quantized and without biases; for a GPU packed as grouped ones.

    Raises:
        ShapeError: the heads do not fit the weights.
        UnsupportedDevice: no implementation for the device.
    """
    shapes = {(head.num_inputs, head.num_outputs) for head in heads}
    require(
        x_TNS.ndim == 3 and x_TNS.shape[1] == len(heads) and len(shapes) == 1 and x_TNS.shape[2] >= heads[0].num_inputs,
        f"head_linear: rows {tuple(x_TNS.shape)} for {len(heads)} heads with (inputs, outputs) {sorted(shapes)}",
    )
    return choose("head_linear", _IMPLEMENTATIONS, x_TNS.device)(x_TNS, heads)
