"""Matrix product with a weight, the same bits for a row in any batch. Does not quantize or shard."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.dispatch import choose, require
from octavo.kernels.linear import cpu

_PACKERS = {"cpu": cpu.Packer}


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight and a bias in the form that one kind of device likes best; made once, when a model is loaded."""

    num_inputs: int
    num_outputs: int
    dtype: torch.dtype
    device: torch.device
    product: cpu.CpuLinear


class Packer:
    """Packs the weights of one model; what it finds out about one weight it uses for those of equal shape."""

    def __init__(self, device: torch.device) -> None:
        self._packer = choose("linear", _PACKERS, device)()

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> PackedLinear:
        """Return the packed form, which no longer needs the arguments.

        Raises:
            ShapeError: the shapes or dtypes do not go together.
        """
        require(weight_OI.ndim == 2, f"linear: a weight of shape {tuple(weight_OI.shape)}")
        require(
            bias_O is None or (bias_O.shape == weight_OI.shape[:1] and bias_O.dtype == weight_OI.dtype),
            "linear: the bias needs one value per output, of the weight's dtype",
        )
        num_outputs, num_inputs = weight_OI.shape
        product = self._packer.pack(weight_OI, bias_O)
        return PackedLinear(num_inputs, num_outputs, weight_OI.dtype, weight_OI.device, product)


def linear(x_TI: Tensor, packed: PackedLinear) -> Tensor:
    """Return `x @ weight.T + bias`, shape TO, in the dtype of `x`.

    Sums are accumulated in float32 at least.

    Raises:
        ShapeError: the rows do not fit the weight, or their dtype or device is another.
    """
    require(
        x_TI.ndim == 2
        and x_TI.shape[1] == packed.num_inputs
        and x_TI.dtype == packed.dtype
        and x_TI.device == packed.device,
        f"linear: {tuple(x_TI.shape)} {x_TI.dtype} on {x_TI.device} with a weight of {packed.num_inputs} inputs, "
        f"{packed.dtype} on {packed.device}",
    )
    return packed.product(x_TI)
