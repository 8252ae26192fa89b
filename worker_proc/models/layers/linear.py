"""A linear layer, its parameters made and named."""

from torch import Tensor

from octavo.kernels.linear import PackedLinear, Packer, linear
from octavo.worker_proc.models.parameters import Parameters


class Linear:
    """`x @ weight.T + bias`; ready for use once its weight is packed, after the checkpoint has filled it."""

    def __init__(
        self, parameters: Parameters, weight_OI: Tensor, bias_O: Tensor | None = None, *, is_tied: bool = False
    ) -> None:
        self._weight_OI: Tensor | None = weight_OI
        self._bias_O = bias_O
        self._is_tied = is_tied
        self._packed: PackedLinear | None = None
        parameters.when_filled(self._pack)

    @classmethod
    def tied(cls, parameters: Parameters, embedding_VD: Tensor) -> "Linear":
        """Make the output layer of a model whose output weight is its embedding, which it goes on using."""
        return cls(parameters, embedding_VD, is_tied=True)

    @classmethod
    def new(
        cls, parameters: Parameters, name: str, inputs: int, outputs: int, *, bias: bool, is_transposed: bool = False
    ) -> "Linear":
        """Make the layer that the checkpoint calls `name`.

        `is_transposed` says that the checkpoint's weight is IO, not OI.
        """
        return cls(
            parameters,
            parameters.new(f"{name}.weight", outputs, inputs, is_transposed=is_transposed),
            parameters.new(f"{name}.bias", outputs) if bias else None,
        )

    @classmethod
    def stacked(cls, parameters: Parameters, name: str, parts: dict[str, int], inputs: int, *, bias: bool) -> "Linear":
        """Make one layer of several of the checkpoint's: `parts` gives their names and numbers of outputs."""
        weights = {f"{part}.weight": rows for part, rows in parts.items()}
        biases = {f"{part}.bias": rows for part, rows in parts.items()}
        return cls(
            parameters,
            parameters.stacked(f"{name}.weight", weights, inputs),
            parameters.stacked(f"{name}.bias", biases) if bias else None,
        )

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the outputs, shape TO."""
        assert self._packed is not None, "the model's weights are not filled in yet"
        return linear(x_TI, self._packed)

    def _pack(self, packer: Packer) -> int:
        """Exchange the weight for its packed form; returns the bytes that this adds to the model."""
        assert self._weight_OI is not None
        self._packed = packer.pack(self._weight_OI, self._bias_O)
        num_bytes = self._weight_OI.nbytes if self._is_tied else 0
        self._weight_OI = self._bias_O = None
        return num_bytes
