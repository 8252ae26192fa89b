"""Runs of vision towers that are measured and estimated, with the sizes of published models."""

from dataclasses import dataclass
from typing import Any, Literal

TowerRunName = Literal["LLaVA-1.5", "SigLIP-so400m", "Qwen2-VL", "Qwen2-VL, the largest image", "Qwen2.5-VL, windows"]


@dataclass(frozen=True)
class TowerRun:
    """Sequences that one run of a tower computes."""

    num_heads: int
    head_dim: int
    length: int
    """Of each part, in patches."""
    num_parts: int

    @property
    def num_rows(self) -> int:
        """Of all parts."""
        return self.length * self.num_parts

    @property
    def flops(self) -> float:
        """Of the attention of one layer."""
        return 4.0 * self.num_heads * self.head_dim * self.length**2 * self.num_parts

    @property
    def num_bytes(self) -> int:
        """Queries, keys, values and results in 16 bits."""
        return 2 * 4 * self.num_rows * self.num_heads * self.head_dim


TOWER_RUNS: dict[TowerRunName, TowerRun] = {
    "LLaVA-1.5": TowerRun(16, 64, 577, 8),
    "SigLIP-so400m": TowerRun(16, 72, 729, 8),
    "Qwen2-VL": TowerRun(16, 80, 4096, 1),
    "Qwen2-VL, the largest image": TowerRun(16, 80, 16384, 1),
    "Qwen2.5-VL, windows": TowerRun(16, 80, 64, 64),
}
TINY_RUN = TowerRun(2, 24, 70, 2)
"""For dry runs."""
VISION_CONFIG: dict[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "num_heads": 16,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
}
"""Of Qwen2-VL-7B: a whole tower."""
TINY_VISION_CONFIG: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "mlp_ratio": 2,
}
