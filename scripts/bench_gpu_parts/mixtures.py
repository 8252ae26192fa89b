"""Mixtures of experts that are measured and estimated: the sizes of a layer, as in a published `config.json`."""

from dataclasses import dataclass
from typing import Literal

MixtureName = Literal["Qwen3-30B-A3B", "GPT-OSS-20B"]


@dataclass(frozen=True)
class Mixture:
    """The routed experts of a layer."""

    num_experts: int
    top_k: int
    width: int
    inner: int
    """Width of the activation of one expert."""
    has_bias: bool = False
    """Whether gates, ups and downs have biases; the activation is clamped then (GPT-OSS)."""

    def weight_bytes(self) -> int:
        """Return the bytes of the weights of one expert, in 16 bits."""
        return 2 * 3 * self.width * self.inner

    def flops(self, num_tokens: int) -> float:
        """Return the operations of a step with `num_tokens` tokens."""
        return 2.0 * 3 * self.width * self.inner * self.top_k * num_tokens


MIXTURES: dict[MixtureName, Mixture] = {
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768),
    "GPT-OSS-20B": Mixture(32, 4, 2880, 2880, has_bias=True),
}
TINY = Mixture(4, 2, 64, 48)
