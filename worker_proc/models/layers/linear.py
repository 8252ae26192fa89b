"""A linear layer, and the creation of its parameters."""

from torch import Tensor

from octavo.kernels.linear import linear, linear_silu_and_mul
from octavo.worker_proc.models.linear_weight import LinearWeight
from octavo.worker_proc.models.parameters import Parameters


class Linear:
    """`x @ weight.T + bias`; usable when its weight is packed."""

    def __init__(self, weight: LinearWeight) -> None:
        self._weight = weight

    @classmethod
    def tied(cls, parameters: Parameters, embedding_VD: Tensor) -> "Linear":
        """Make the output layer of a model whose output weight is its embedding."""
        return cls(parameters.tied(embedding_VD))

    @classmethod
    def new(
        cls, parameters: Parameters, name: str, inputs: int, outputs: int, *, bias: bool, is_transposed: bool = False
    ) -> "Linear":
        """Make the layer that the checkpoint calls `name`.

        `is_transposed`: the weight in the checkpoint has shape IO, not OI.
        """
        return cls(parameters.linear(name, {name: outputs}, inputs, bias=bias, is_transposed=is_transposed))

    @classmethod
    def stacked(cls, parameters: Parameters, name: str, parts: dict[str, int], inputs: int, *, bias: bool) -> "Linear":
        """Make one layer from several of the checkpoint; `parts` has their names and numbers of outputs."""
        return cls(parameters.linear(name, parts, inputs, bias=bias))

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the outputs, shape TO."""
        product_TO = linear(x_TI, self._weight.packed)
        return product_TO if self._weight.exchange is None else self._weight.exchange(product_TO)

    def silu_and_mul(self, x_TI: Tensor) -> Tensor:
        """Return the gated activation of the outputs, half as many: see `octavo.kernels.silu_and_mul`."""
        assert self._weight.exchange is None, "the activation of partial sums is not a part of the activation"
        return linear_silu_and_mul(x_TI, self._weight.packed)
