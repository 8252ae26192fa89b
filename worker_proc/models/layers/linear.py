"""A linear layer, its parameters made and named."""

from torch import Tensor

from octavo.kernels.linear import linear
from octavo.worker_proc.models.linear_weight import LinearWeight
from octavo.worker_proc.models.parameters import Parameters


class Linear:
    """`x @ weight.T + bias`; ready for use once its weight is packed, after the checkpoint has filled it."""

    def __init__(self, weight: LinearWeight) -> None:
        self._weight = weight

    @classmethod
    def tied(cls, parameters: Parameters, embedding_VD: Tensor) -> "Linear":
        """Make the output layer of a model whose output weight is its embedding, which it goes on using."""
        return cls(parameters.tied(embedding_VD))

    @classmethod
    def new(
        cls, parameters: Parameters, name: str, inputs: int, outputs: int, *, bias: bool, is_transposed: bool = False
    ) -> "Linear":
        """Make the layer that the checkpoint calls `name`.

        `is_transposed` says that the checkpoint's weight is IO, not OI.
        """
        return cls(parameters.linear(name, {name: outputs}, inputs, bias=bias, is_transposed=is_transposed))

    @classmethod
    def stacked(cls, parameters: Parameters, name: str, parts: dict[str, int], inputs: int, *, bias: bool) -> "Linear":
        """Make one layer of several of the checkpoint's: `parts` gives their names and numbers of outputs."""
        return cls(parameters.linear(name, parts, inputs, bias=bias))

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the outputs, shape TO."""
        return linear(x_TI, self._weight.packed)
