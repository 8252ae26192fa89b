"""The tower of Qwen2-VL: patches of images of any size, rotated by row and column; a square is a row of the prompt."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.models.checkpoint import Rule, Values, renamed, split_rows, stacked_qkv
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import PreNormLayer
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.rotary import Rotary
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.tower import (
    MergedProjection,
    Patches,
    TowerSpec,
    VisionTower,
    array_of,
)

_EPS = 1e-6
_NAMES = {
    r"^blocks\.": "layers.",
    r"\.attn\.proj\.": ".attn.o_proj.",
    r"^patch_embed\.proj\.": "patch_embed.",
    r"^merger\.mlp\.0\.": "merger.fc1.",
    r"^merger\.mlp\.2\.": "merger.fc2.",
}
_READ_ELSEWHERE = (
    *("text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    *("vision_end_token_id", "vision_token_id", "tie_word_embeddings"),
)
_UNUSED = ("spatial_patch_size", "tokens_per_second", "in_chans")


@dataclass(frozen=True, slots=True)
class QwenVisionConfig:
    """Sizes of the tower."""

    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    patch_width: int
    """Numbers of a patch, of all its frames."""
    merge_size: int
    """Patches on each side of a square that is a row of the prompt."""
    activation: str
    theta: float
    """Base of the rotary angles."""

    @classmethod
    def read(cls, section: Mapping[str, Any], spec: TowerSpec) -> "QwenVisionConfig":
        """Read `vision_config` of Qwen2-VL.

        Raises:
            ConfigError: a value is not supported.
        """
        config = CheckedConfig(section)
        ignore(config, *_UNUSED)
        width = optional(config, "embed_dim", 1280)
        channels, frames = optional(config, "in_channels", 3), optional(config, "temporal_patch_size", 2)
        rope: dict[str, Any] = optional(config, "rope_parameters", {})
        read = cls(
            width=width,
            inner_width=int(width * float(optional(config, "mlp_ratio", 4))),
            num_layers=optional(config, "depth", 32),
            num_heads=optional(config, "num_heads", 16),
            patch_width=channels * frames * optional(config, "patch_size", 14) ** 2,
            merge_size=optional(config, "spatial_merge_size", 2),
            activation=activation(config, "quick_gelu", PLAIN),
            theta=float(rope.get("rope_theta", 10000.0)),
        )
        if (given := required(config, "hidden_size", int)) != spec.width:
            raise ConfigError(f"config.json: 'vision_config' makes rows of {given} numbers, not {spec.width}")
        config.reject_unread("a vision tower", section="vision_config")
        return read

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.width // self.num_heads

    @property
    def shape(self) -> AttentionShape:
        """Of the attention of all layers."""
        return AttentionShape(self.num_heads, self.num_heads, self.head_dim, self.head_dim**-0.5, is_causal=False)


class QwenTower(VisionTower):
    """The tower with its projector."""

    merge_size: int
    rotary: Rotary
    """Of half a head: the first half rotates by the row of a patch, the second by its column."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `VisionTower.patches`: one sequence for each frame, whose patches come square by square."""
        rows_TP, grid = patches_and_grid(tensors, self.merge_size)
        places_2T = places_of_patches(grid[1], grid[2], self.merge_size)
        angles = self.angles_at(places_2T)
        num_patches = places_2T.shape[1]
        all_T = np.arange(num_patches)
        frames = np.split(rows_TP, grid[0])
        return [Patches(frame_TP, np.zeros(num_patches, dtype=np.int64), all_T, angles) for frame_TP in frames]

    def angles_at(self, places_2T: Ints) -> tuple[Any, Any]:
        """Return cosines and sines of patches at some rows and columns, each of shape TC."""
        self.rotary.prepare(int(places_2T.max()) + 1, torch.device("cpu"))
        rows, columns = (self.rotary.angles(torch.from_numpy(places_T)) for places_T in places_2T)
        cos, sin = (torch.cat(parts, dim=1).numpy() for parts in zip(rows, columns, strict=True))
        return cos, sin


def patches_and_grid(tensors: Mapping[str, MediaTensor], merge_size: int) -> tuple[Any, list[int]]:
    """Return the patches of an image, and how many frames, rows and columns of patches they are.

    Raises:
        ProtocolError: they are not whole squares.
    """
    rows_TP = array_of(tensors, "pixel_values", np.float32, 2)
    ((frames, height, width),) = array_of(tensors, "image_grid_thw", np.int64, 2).tolist()
    if frames * height * width != len(rows_TP) or height % merge_size or width % merge_size:
        raise ProtocolError(f"{len(rows_TP)} patches for a grid of {frames} x {height} x {width}")
    return rows_TP, [frames, height, width]


def places_of_patches(height: int, width: int, merge_size: int) -> Ints:
    """Return the row and the column of each patch of a frame, whose squares are row by row: shape 2T."""
    places = np.indices((height, width)).reshape(2, height // merge_size, merge_size, -1, merge_size)
    in_order: Ints = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return in_order


def qwen_rules(config: QwenVisionConfig, names: Mapping[str, str]) -> list[Rule]:
    """Return what becomes of the tensors of a checkpoint."""
    rows = stacked_qkv(config.num_heads, config.num_heads, config.head_dim)
    return [renamed(names), split_rows("qkv", rows), _flat_patches]


def build(spec: TowerSpec) -> QwenTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *_READ_ELSEWHERE)
    own = QwenVisionConfig.read(config["vision_config"], spec)
    prefixes = ["visual.", "model.visual."]
    parameters = Parameters(spec.placement, prefixes=prefixes, rules=qwen_rules(own, _NAMES))
    patch = Linear.new(parameters, "patch_embed", own.patch_width, own.width, bias=False)
    merged_width = own.width * own.merge_size**2
    merger = Mlp(
        parameters, "merger", merged_width, merged_width, num_outputs=spec.width, activation="gelu", has_bias=True
    )
    tower = QwenTower(
        parameters,
        [own.shape] * own.num_layers,
        width=own.width,
        patch_width=own.patch_width,
        max_item_rows=spec.max_item_tokens * own.merge_size**2,
        embed=lambda patches_TP, positions_T: patch(patches_TP),
        layers=_layers(parameters, own),
        project=LayerNorm.new(parameters, "merger.ln_q", own.width, _EPS),
        library=spec.library,
        merged=MergedProjection(own.merge_size**2, merger),
        table_widths=[own.head_dim // 2] * 2,
    )
    tower.merge_size = own.merge_size
    tower.rotary = Rotary.of(own.theta, own.head_dim // 4)
    return tower


def _layers(parameters: Parameters, config: QwenVisionConfig) -> Sequence[PreNormLayer]:
    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        attention = SelfAttention(
            parameters,
            f"{name}.attn",
            index,
            config.shape,
            config.width,
            has_qkv_bias=True,
            has_output_bias=True,
        )
        mlp = Mlp(
            parameters, f"{name}.mlp", config.width, config.inner_width, activation=config.activation, has_bias=True
        )
        return PreNormLayer(
            LayerNorm.new(parameters, f"{name}.norm1", config.width, _EPS),
            attention,
            LayerNorm.new(parameters, f"{name}.norm2", config.width, _EPS),
            mlp,
        )

    return [layer(index) for index in range(config.num_layers)]


def _flat_patches(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Make the weight of a convolution over patches that of a linear layer."""
    yield name, values.flatten(1) if isinstance(values, Tensor) and name == "patch_embed.weight" else values
