"""The weights of the experts of one layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.linear import PackedLinear

Activation = Literal["silu_and_mul", "clamped_swiglu", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = ("silu_and_mul", "clamped_swiglu", "relu2")
"""`silu(gate) * up`; for GPT-OSS `(up + 1) * gate * sigmoid(1.702 gate)`, with gates clamped to at most 7 and ups to
-7..7; for Nemotron-H `relu(up)^2`, without gates. In the order of `octavo::Activation`, from 1."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedExperts:
    """The packed weights of the experts that this process holds: a contiguous range of the experts of a layer.

    Raises:
        ShapeError: they differ in shape, or in the form in which they need their rows.
    """

    num_experts: int
    """Number of experts of all processes."""
    gates: Sequence[PackedLinear]
    """Weights applied to the hidden state; gates and ups may have biases, downs must not. Empty if the activation has
    no gates."""
    ups: Sequence[PackedLinear]
    downs: Sequence[PackedLinear]
    activation: Activation = "silu_and_mul"
    down_bias_ED: Tensor | None = None
    """Biases of all experts."""
    first_own: int = 0

    def __post_init__(self) -> None:
        weights = [*self.gates, *self.ups, *self.downs]
        require(
            bool(self.ups)
            and len(self.gates) == (0 if self.activation == "relu2" else len(self.ups))
            and len(self.ups) == len(self.downs),
            f"experts: {len(self.gates)} gates, {len(self.ups)} ups and {len(self.downs)} downs for {self.activation}",
        )
        require(
            self.first_own >= 0 and self.first_own + len(self.ups) <= self.num_experts,
            f"experts: {len(self.ups)} from {self.first_own} of {self.num_experts}",
        )
        shapes = {(weight.num_inputs, weight.num_outputs) for weight in (*self.gates, *self.ups)}
        require(
            shapes == {(self.width, self.intermediate)}
            and {(weight.num_inputs, weight.num_outputs) for weight in self.downs} == {(self.intermediate, self.width)},
            "experts: weights of different shapes",
        )
        require(len({weight.device for weight in weights}) == 1, "experts: weights on different devices")
        require(
            self.down_bias_ED is None or self.down_bias_ED.shape == (self.num_experts, self.width),
            "experts: the bias needs one value for each expert and output",
        )

    @property
    def width(self) -> int:
        """Width of the hidden state."""
        return self.ups[0].num_inputs

    @property
    def intermediate(self) -> int:
        """Width of the activation."""
        return self.ups[0].num_outputs

    @property
    def own(self) -> range:
        """The experts that this process holds."""
        return range(self.first_own, self.first_own + len(self.ups))
