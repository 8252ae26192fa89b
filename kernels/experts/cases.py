"""Cases of `experts`: layers of small models, and odd ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.experts.weights import Activation
from octavo.kernels.routing.rule import RoutingRule


@dataclass(frozen=True, slots=True)
class Layer:
    """The sizes of a mixture of experts."""

    num_experts: int
    top_k: int
    width: int
    intermediate: int
    activation: Activation = "silu_and_mul"
    has_bias: bool = False

    @property
    def rule(self) -> RoutingRule:
        """How its tokens are routed."""
        return RoutingRule(self.num_experts, self.top_k)


CASES = {
    "small": Layer(8, 2, 64, 96),
    "odd": Layer(5, 3, 33, 41),
    "biases": Layer(4, 2, 80, 72, "clamped_swiglu", has_bias=True),
    "no gates": Layer(6, 2, 72, 88, "relu2"),
    "one expert": Layer(1, 1, 48, 64),
    "Granite": Layer(40, 8, 256, 128),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}


def weights(layer: Layer, seed: int = 0) -> dict[str, Tensor]:
    """Return float32 weights and biases, by the names of the reference's parameters."""
    noise = torch.Generator().manual_seed(seed)
    count, width, intermediate = layer.num_experts, layer.width, layer.intermediate

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=noise) * scale

    found = {
        "gate_EID": normal(count, intermediate, width, scale=2 * width**-0.5),
        "up_EID": normal(count, intermediate, width, scale=2 * width**-0.5),
        "down_EDI": normal(count, width, intermediate, scale=intermediate**-0.5),
    }
    if layer.has_bias:
        found |= {
            "gate_bias_EI": normal(count, intermediate, scale=1.0),
            "up_bias_EI": normal(count, intermediate, scale=1.0),
            "down_bias_ED": normal(count, width, scale=1.0),
        }
    if layer.activation == "relu2":
        del found["gate_EID"]
    return found
