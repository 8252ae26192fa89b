"""Llama 4: tiles of an image, patches rotated by row and column; each square of results is a row of the prompt."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.embedding import embedding
from octavo.protocol.errors import ConfigError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.checkpoint import Rule, halves_of_pairs, renamed, reordered_rows
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless
from octavo.worker_proc.models.layers.activation import PLAIN
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import PreNormLayer
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.clip import ClipConfig
from octavo.worker_proc.models.vision.tower import (
    Floats,
    MediaTower,
    MergedProjection,
    Patches,
    TowerSpec,
    order_by_square,
    pixels_of,
    square_patches,
    theta_of,
)
from octavo.worker_proc.parallel.placement import Placement

_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,  # `transformers` has no other, whatever `norm_eps` says
}
_READ_HERE = (
    *("pixel_shuffle_ratio", "projector_input_dim", "projector_output_dim", "vision_output_dim", "rope_parameters"),
    *("rope_theta", "norm_eps", "projector_dropout", "multi_modal_projector_bias", "vision_feature_layer"),
    *("vision_feature_select_strategy", "attention_dropout"),
)
_READ_ELSEWHERE = (
    *("text_config", "vision_config", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index"),
    *("boi_token_id", "eoi_token_id", "tie_word_embeddings"),
)
_NAMES = {
    r"^model\.layers\.": "layers.",
    r"^patch_embedding\.linear\.": "patch_embedding.",
    r"^vision_adapter\.mlp\.": "adapter.",
    r"^positional_embedding_vlm$": "position_embedding",
}


class Llama4Tower(MediaTower):
    """The tower with its projector."""

    clip: ClipConfig
    merge_size: int
    """Number of patches on each side of a square, which becomes a prompt row."""
    angles: tuple[Floats, Floats]
    """Cosines and sines of the patches of a tile, followed by those of the class token."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: one sequence per tile, square by square, followed by the class token."""
        order_T = order_by_square(self.clip.side, self.merge_size)
        num_patches = len(order_T)
        positions_T = np.append(order_T, num_patches)
        cos, sin = (table[positions_T] for table in self.angles)
        sequences = []
        for tile_CHW in pixels_of(tensors, "pixel_values", 4):
            self.clip.check_picture(tile_CHW)
            rows_TP = np.zeros((num_patches + 1, self.clip.patch_width), dtype=np.float32)
            rows_TP[:-1] = square_patches(tile_CHW, self.clip.patch_size)[order_T]
            sequences.append(Patches(rows_TP, positions_T, np.arange(num_patches), (cos, sin)))
        return sequences


class _Embedding:
    """Patches through a linear layer, plus positions, then a norm. The last position is the class token's."""

    def __init__(self, parameters: Parameters, clip: ClipConfig) -> None:
        self._patch = Linear.new(parameters, "patch_embedding", clip.patch_width, clip.width, bias=False)
        self._class_D = parameters.new("class_embedding", clip.width)
        self._positions_LD = parameters.new("position_embedding", clip.num_positions, clip.width)
        self._norm = LayerNorm.new(parameters, "layernorm_pre", clip.width, clip.eps)
        self._table_LD: Tensor | None = None

    def __call__(self, patches_TP: Tensor, positions_T: Tensor) -> Tensor:
        """Return the residual stream before the first layer."""
        if self._table_LD is None:
            self._table_LD = self._positions_LD.clone()
            self._table_LD[-1] += self._class_D
        return self._norm(self._patch(patches_TP) + embedding(positions_T, self._table_LD))


class _Projector:
    """The adapter's two layers over a square of results, each with an activation, and the projection to the prompt."""

    def __init__(self, parameters: Parameters, inputs: int, inner: int, outputs: int) -> None:
        self._first = Linear.new(parameters, "adapter.fc1", inputs, inner, bias=False)
        self._second = Linear.new(parameters, "adapter.fc2", inner, inner, bias=False)
        self._last = Linear.new(parameters, "linear_1", inner, outputs, bias=False)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows of the prompt."""
        gelu = PLAIN["gelu"]
        return self._last(gelu(self._second(gelu(self._first(rows)))))


def build(spec: TowerSpec) -> Llama4Tower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *_READ_ELSEWHERE)
    section = CheckedConfig(config["vision_config"])
    clip = ClipConfig.read(section, _DEFAULTS, unused=_READ_HERE)
    merge_size, inner_width = _projector_sizes(section, clip)
    config.reject_unread(spec.facts.architecture)
    parameters = _parameters(spec.placement, clip)
    merged_width = clip.width * merge_size**2
    head_dim = clip.shape.head_dim
    tower = Llama4Tower(
        parameters,
        [clip.shape] * clip.num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=_Embedding(parameters, clip),
        layers=[_layer(parameters, index, clip) for index in range(clip.num_layers)],
        project=LayerNorm.new(parameters, "layernorm_post", clip.width, clip.eps),
        library=spec.library,
        merged=MergedProjection(merge_size**2, _Projector(parameters, merged_width, inner_width, spec.width)),
        table_widths=[head_dim // 2] * 2,
    )
    tower.clip, tower.merge_size = clip, merge_size
    tower.angles = _angles(clip.side, head_dim, theta_of(section))
    return tower


def _projector_sizes(section: CheckedConfig, clip: ClipConfig) -> tuple[int, int]:
    """Return the number of patches on each side of a square, and the width of the adapter.

    Raises:
        ConfigError: sizes contradict each other.
    """
    reject_unless(section, "vision_feature_select_strategy", ["default", None])
    reject_unless(section, "multi_modal_projector_bias", [False, None])
    ratio = optional(section, "pixel_shuffle_ratio", 0.5)
    merge_size = round(1 / ratio) if 0 < ratio <= 1 else 0
    if not merge_size or 1 / merge_size != ratio or clip.side % merge_size:
        raise ConfigError(f"config.json: 'pixel_shuffle_ratio' is {ratio} for {clip.side} patches on each side")
    if clip.inner_width != clip.width * merge_size**2:
        raise ConfigError(
            f"config.json: 'intermediate_size' of 'vision_config' is {clip.inner_width}; expected {merge_size**2} "
            f"times its hidden_size, {clip.width * merge_size**2}"
        )
    names = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
    widths = [optional(section, name, default) for name, default in zip(names, (4096, 4096, 7680), strict=True)]
    if len(set(widths)) > 1:
        raise ConfigError(f"config.json: {', '.join(names)} of 'vision_config' differ: {widths}")
    if clip.shape.head_dim % 4:
        raise ConfigError(
            f"config.json: heads of {clip.shape.head_dim} numbers in 'vision_config'; expected a multiple of 4"
        )
    return merge_size, widths[0]


def _parameters(placement: Placement, clip: ClipConfig) -> Parameters:
    prefixes = [f"{outer}{inner}." for outer in ("", "model.") for inner in ("vision_model", "multi_modal_projector")]
    order = halves_of_pairs(clip.num_heads, clip.shape.head_dim, clip.shape.head_dim)
    rules: list[Rule] = [renamed(_NAMES), reordered_rows(r"\.[qk]_proj\.", order)]
    return Parameters(placement, prefixes=prefixes, ignored=[r"^rotary_embedding\."], rules=rules)


def _layer(parameters: Parameters, index: int, clip: ClipConfig) -> PreNormLayer:
    name = f"layers.{index}"
    return PreNormLayer(
        LayerNorm.new(parameters, f"{name}.input_layernorm", clip.width, clip.eps),
        SelfAttention(
            parameters, f"{name}.self_attn", index, clip.shape, clip.width, has_qkv_bias=True, has_output_bias=True
        ),
        LayerNorm.new(parameters, f"{name}.post_attention_layernorm", clip.width, clip.eps),
        Mlp(parameters, f"{name}.mlp", clip.width, clip.inner_width, activation="gelu", has_bias=True),
    )


def _angles(side: int, head_dim: int, theta: float) -> tuple[Floats, Floats]:
    """Return the tables of a tile: half of the pairs rotate by the column, the others by the row, both from 1."""
    places = torch.arange(side * side)
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2))
    angles = torch.cat([((one + 1)[:, None] * frequencies) for one in (places % side, places // side)], dim=1)
    angles = torch.cat([angles, torch.zeros(1, head_dim // 2)])  # the class token is not rotated
    return angles.cos().numpy(), angles.sin().numpy()
