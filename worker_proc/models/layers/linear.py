"""A linear layer, its parameters made and named."""

from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.linear import linear
from octavo.worker_proc.models.parameters import Parameters


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """`x @ weight.T + bias`."""

    weight_OI: Tensor
    bias_O: Tensor | None = None

    @classmethod
    def new(
        cls, parameters: Parameters, name: str, inputs: int, outputs: int, *, bias: bool, is_transposed: bool = False
    ) -> "Linear":
        """Make the layer that the checkpoint calls `name`.

        `is_transposed` says that the checkpoint's weight is IO, not OI.
        """
        return cls(
            parameters.new(f"{name}.weight", outputs, inputs, is_transposed=is_transposed),
            parameters.new(f"{name}.bias", outputs) if bias else None,
        )

    @classmethod
    def stacked(cls, parameters: Parameters, name: str, parts: dict[str, int], inputs: int, *, bias: bool) -> "Linear":
        """Make one layer of several of the checkpoint's: `parts` gives their names and numbers of outputs."""
        weights = {f"{part}.weight": rows for part, rows in parts.items()}
        biases = {f"{part}.bias": rows for part, rows in parts.items()}
        return cls(
            parameters.stacked(f"{name}.weight", weights, inputs),
            parameters.stacked(f"{name}.bias", biases) if bias else None,
        )

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the outputs, shape TO."""
        return linear(x_TI, self.weight_OI, self.bias_O)
