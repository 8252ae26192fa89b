"""Pixtral's tower, in LLaVA-1.5's form and in Mistral 3: images of any size, patches rotated by row and column."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.checkpoint import Rule, Values, renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless
from octavo.worker_proc.models.layers.activation import GATED, PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import PreNormLayer
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import GatedMlp, Mlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.rotary import Rotary
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.tower import (
    MediaTower,
    MergedProjection,
    Patches,
    TowerSpec,
    pixels_of,
    places_of_patches,
    square_patches,
    theta_of,
)

_EPS = 1e-5
_NAMES = {
    r"^transformer\.": "",
    r"\.attention\.": ".self_attn.",
    r"\.feed_forward\.": ".mlp.",
    r"^linear_([12])\.": r"projector.fc\1.",
}
_READ_ELSEWHERE = (
    *("text_config", "vision_config", "image_token_index", "image_token_id", "image_seq_length", "ignore_index"),
    *("tie_word_embeddings", "vision_feature_select_strategy"),
)


@dataclass(frozen=True, slots=True)
class PixtralConfig:
    """Sizes of the tower."""

    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    num_channels: int
    patch_size: int
    activation: str
    theta: float

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> "PixtralConfig":
        """Read `vision_config`.

        Raises:
            ConfigError: a value is not supported.
        """
        config = CheckedConfig(section, "vision_config")
        ignore(config, "image_size", "vocab_size", "projection_dim")
        read = cls(
            width=optional(config, "hidden_size", 1024),
            inner_width=optional(config, "intermediate_size", 4096),
            num_layers=optional(config, "num_hidden_layers", 24),
            num_heads=optional(config, "num_attention_heads", 16),
            num_channels=optional(config, "num_channels", 3),
            patch_size=optional(config, "patch_size", 16),
            activation=activation(config, "gelu", GATED),
            theta=theta_of(config),
        )
        reject_unless(config, "head_dim", [None, read.head_dim])
        config.reject_unread("a vision tower")
        return read

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.num_heads


class PixtralTower(MediaTower):
    """The tower with its projector."""

    own: PixtralConfig
    merge_size: int
    """Number of patches on each side of a square, which becomes a prompt row."""
    rotaries: tuple[Rotary, Rotary]
    """Rotary angles of a patch's row and of its column: a quarter of a head's dimensions each."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: the patches of an image are in order of squares."""
        (pixels_CHW, *others) = pixels_of(tensors, "pixel_values", 4)
        size = self.own.patch_size
        height, width = (pixels // size for pixels in pixels_CHW.shape[1:])
        if others or len(pixels_CHW) != self.own.num_channels or height % self.merge_size or width % self.merge_size:
            raise ProtocolError(f"pixel_values of shape {pixels_CHW.shape} for squares of {self.merge_size} patches")
        places_2T = places_of_patches(height, width, self.merge_size)
        order_T, all_T = places_2T[0] * width + places_2T[1], np.arange(height * width)
        for rotary in self.rotaries:
            rotary.prepare(max(height, width), torch.device("cpu"))
        places = map(torch.from_numpy, places_2T)
        angles = [rotary.angles(places_T) for rotary, places_T in zip(self.rotaries, places, strict=True)]
        cos, sin = (torch.cat(parts, dim=1).numpy() for parts in zip(*angles, strict=True))
        return [Patches(square_patches(pixels_CHW, size)[order_T], np.zeros_like(all_T), all_T, (cos, sin))]


def build(spec: TowerSpec) -> PixtralTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *_READ_ELSEWHERE)
    own = PixtralConfig.read(config["vision_config"])
    if own.width % own.num_heads or own.head_dim % 4:
        raise ConfigError(f"config.json: heads of {own.head_dim} numbers in 'vision_config'; expected a multiple of 4")
    is_merged = spec.facts.architecture.startswith("Mistral3")
    merge_size = optional(config, "spatial_merge_size", 2) if is_merged else 1
    reject_unless(config, "vision_feature_layer", [-1, own.num_layers, *([None] if is_merged else [])])
    prefixes = [f"{outer}{inner}." for outer in ("", "model.") for inner in ("vision_tower", "multi_modal_projector")]
    rules: list[Rule] = [renamed(_NAMES), partial(_flat_patches, merge_size=merge_size)]
    parameters = Parameters(spec.placement, prefixes=prefixes, rules=rules)
    head_dim = own.head_dim
    shape = AttentionShape(own.num_heads, own.num_heads, head_dim, head_dim**-0.5, is_causal=False)
    patch = Linear.new(parameters, "patch_conv", own.num_channels * own.patch_size**2, own.width, bias=False)
    first_norm = RMSNorm.new(parameters, "ln_pre", own.width, _EPS)
    projector = Mlp(
        parameters,
        "projector",
        own.width,
        spec.width,
        num_outputs=spec.width,
        activation=activation(config, "gelu", PLAIN, key="projector_hidden_act"),
        has_bias=optional(config, "multimodal_projector_bias", not is_merged),
    )
    project: Callable[[Tensor], Tensor] = projector
    merged = None
    if is_merged:
        eps = float(config["text_config"].get("rms_norm_eps", _EPS))
        project = RMSNorm.new(parameters, "norm", own.width, eps)
        merging = Linear.new(parameters, "patch_merger.merging_layer", own.width * merge_size**2, own.width, bias=False)
        merged = MergedProjection(merge_size**2, lambda rows: projector(merging(rows)))
    config.reject_unread(spec.facts.architecture)
    tower = PixtralTower(
        parameters,
        [shape] * own.num_layers,
        width=own.width,
        patch_width=own.num_channels * own.patch_size**2,
        max_item_rows=spec.max_item_tokens * merge_size**2,
        embed=lambda patches_TP, positions_T: first_norm(patch(patches_TP)),
        layers=[_layer(parameters, index, shape, own) for index in range(own.num_layers)],
        project=project,
        library=spec.library,
        merged=merged,
        table_widths=[head_dim // 2] * 2,
    )
    tower.own, tower.merge_size = own, merge_size
    frequencies_C = own.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    tower.rotaries = Rotary(frequencies_C[0::2]), Rotary(frequencies_C[1::2])
    return tower


def _layer(parameters: Parameters, index: int, shape: AttentionShape, own: PixtralConfig) -> PreNormLayer:
    name = f"layers.{index}"
    return PreNormLayer(
        RMSNorm.new(parameters, f"{name}.attention_norm", own.width, _EPS),
        SelfAttention(parameters, f"{name}.self_attn", index, shape, own.width),
        RMSNorm.new(parameters, f"{name}.ffn_norm", own.width, _EPS),
        GatedMlp(parameters, f"{name}.mlp", own.width, own.inner_width, activation=own.activation),
    )


def _flat_patches(name: str, values: Values, *, merge_size: int) -> Iterator[tuple[str, Values]]:
    """Reshape patch-embedding weights to linear layers over rows; channels come last in squares of results."""
    if isinstance(values, Tensor) and name == "patch_conv.weight":
        values = values.flatten(1)
    elif isinstance(values, Tensor) and name == "patch_merger.merging_layer.weight":
        values = values.unflatten(1, (-1, merge_size**2)).transpose(1, 2).flatten(1)
    yield name, values
