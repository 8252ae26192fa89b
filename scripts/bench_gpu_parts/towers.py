"""Runs of towers that are measured and estimated, with the sizes of published models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.protocol.media import Kind

TowerRunName = Literal[
    "LLaVA-1.5", "SigLIP-so400m", "Qwen2-VL", "Qwen2-VL, the largest image", "Qwen2.5-VL, windows", "Whisper"
]
TowerName = Literal["Qwen2-VL", "Whisper"]


@dataclass(frozen=True)
class TowerRun:
    """Sequences that a tower computes in one run."""

    num_heads: int
    head_dim: int
    length: int
    """Number of patches of each part."""
    num_parts: int

    @property
    def num_rows(self) -> int:
        """Number of patches of all parts."""
        return self.length * self.num_parts

    @property
    def flops(self) -> float:
        """Operations of the attention of one layer."""
        return 4.0 * self.num_heads * self.head_dim * self.length**2 * self.num_parts

    @property
    def num_bytes(self) -> int:
        """Bytes of queries, keys, values and results in 16 bits."""
        return 2 * 4 * self.num_rows * self.num_heads * self.head_dim


TOWER_RUNS: dict[TowerRunName, TowerRun] = {
    "LLaVA-1.5": TowerRun(16, 64, 577, 8),
    "SigLIP-so400m": TowerRun(16, 72, 729, 8),
    "Qwen2-VL": TowerRun(16, 80, 4096, 1),
    "Qwen2-VL, the largest image": TowerRun(16, 80, 16384, 1),
    "Qwen2.5-VL, windows": TowerRun(16, 80, 64, 64),
    "Whisper": TowerRun(20, 64, 1500, 4),
}
TINY_RUN = TowerRun(2, 24, 70, 2)
"""Run for dry runs."""


@dataclass(frozen=True)
class Tower:
    """A complete tower."""

    architecture: str
    kind: Kind
    config: dict[str, Any]
    tiny_config: dict[str, Any]
    """Configuration for dry runs."""
    width: int
    """Width of the residual stream."""
    num_layers: int
    row: str
    """Description of a run of `lengths[0]` rows."""
    lengths: tuple[int, ...]
    """Lengths of the sequences of a run, in rows; the first sequence is also measured alone."""
    tiny_lengths: tuple[int, ...]
    uses: Mapping[str, float] = field(default_factory=dict)
    """How often a row is multiplied with weights whose names have these prefixes, if not once."""


_QWEN2_VL = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "num_heads": 16,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
}
_TINY_QWEN2_VL = {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}


def _whisper(width: int, num_layers: int, num_heads: int, num_rows: int, num_mels: int) -> dict[str, Any]:
    return {
        "d_model": width,
        "encoder_ffn_dim": 4 * width,
        "encoder_layers": num_layers,
        "encoder_attention_heads": num_heads,
        "max_source_positions": num_rows,
        "num_mel_bins": num_mels,
        "activation_function": "gelu",
    }


TOWERS: dict[TowerName, Tower] = {
    "Qwen2-VL": Tower(
        "Qwen2VLForConditionalGeneration",
        "image",
        {"vision_config": _QWEN2_VL},
        {"vision_config": _TINY_QWEN2_VL},
        1280,
        32,
        "an image of 1,024 tokens",
        (4096, 960, 12),
        (24, 8),
        {"merger": 0.25},  # four patches make a row of the projector
    ),
    "Whisper": Tower(
        "WhisperForConditionalGeneration",
        "audio",
        _whisper(1280, 32, 20, 1500, 128),
        _whisper(32, 1, 2, 20, 8),
        1280,
        32,
        "a window of 30 seconds",
        (1500, 1500, 1500),
        (20, 20),
        {"conv1": 2.0, "embed_positions": 0.0},
    ),
}
"""Towers of Qwen2-VL-7B and of Whisper-large-v3."""
