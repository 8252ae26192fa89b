"""Gemma 3: a SigLIP tower; the mean of each square of its results is a prompt row."""

from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.add import add
from octavo.kernels.pointwise import scale
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.checkpoint import Rule, one_added, renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import LayerNorm, RMSNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.clip import SIGLIP_DEFAULTS, ClipConfig, SiglipEmbedding, clip_layers, clip_rules
from octavo.worker_proc.models.vision.tower import (
    MediaTower,
    MergedProjection,
    Patches,
    TowerSpec,
    order_by_square,
    pixels_of,
    square_patches,
)

_READ_ELSEWHERE = (
    *("text_config", "vision_config", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index"),
    *("boi_token_id", "eoi_token_id", "tie_word_embeddings", "eos_token_id"),
)


class Gemma3Tower(MediaTower):
    """The tower with its projector."""

    clip: ClipConfig
    side: int
    """Number of patches on each side of a square, which becomes a prompt row."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`; an image with crops (pan and scan) has one sequence per crop."""
        pixels_NCHW = pixels_of(tensors, "pixel_values", 4)
        size = self.clip.num_channels, self.clip.image_size, self.clip.image_size
        if pixels_NCHW.shape[1:] != size:
            raise ProtocolError(f"pixel_values of shape {pixels_NCHW.shape} for a tower of {size}")
        order_T, all_T = order_by_square(self.clip.side, self.side), np.arange(self.clip.num_positions)
        return [
            Patches(square_patches(pixels_CHW, self.clip.patch_size)[order_T], order_T, all_T)
            for pixels_CHW in pixels_NCHW
        ]


def build(spec: TowerSpec) -> Gemma3Tower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *_READ_ELSEWHERE)
    clip = ClipConfig.read(config["vision_config"], SIGLIP_DEFAULTS, has_class_token=False)
    num_rows = optional(config, "mm_tokens_per_image", 256)
    config.reject_unread(spec.facts.architecture)
    inner, patches_on_side = int(num_rows**0.5), clip.side
    if inner**2 != num_rows or patches_on_side % inner:
        raise ConfigError(f"config.json: {patches_on_side}^2 patches of an image are not {num_rows} squares")
    side = patches_on_side // inner
    prefixes = [
        f"{outer}{inner}"
        for outer in ("", "model.")
        for inner in ("vision_tower.vision_model.", "vision_tower.", "multi_modal_projector.")
    ]
    rules: list[Rule] = [
        *clip_rules(),
        renamed({r"^mm_input_projection_weight$": "projection.weight"}),
        one_added(r"^mm_soft_emb_norm\.weight$"),
    ]
    parameters = Parameters(spec.placement, prefixes=prefixes, ignored=[r"position_ids$", r"^head\."], rules=rules)
    norm = RMSNorm.new(parameters, "mm_soft_emb_norm", clip.width, clip.eps, dtype=torch.float32)
    projection = Linear.new(parameters, "projection", clip.width, spec.width, bias=False, is_transposed=True)
    tower = Gemma3Tower(
        parameters,
        [clip.shape] * clip.num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=SiglipEmbedding(parameters, clip),
        layers=clip_layers(parameters, clip, clip.num_layers),
        project=LayerNorm.new(parameters, "post_layernorm", clip.width, clip.eps),
        library=spec.library,
        merged=MergedProjection(side**2, _projector(norm, projection, clip.width, side**2)),
    )
    tower.clip, tower.side = clip, side
    return tower


def _projector(norm: RMSNorm, projection: Linear, width: int, num_merged: int) -> Callable[[Tensor], Tensor]:
    def project(rows: Tensor) -> Tensor:
        total = reduce(add, rows.split([width] * num_merged, dim=1))
        return projection(norm(scale(total, 1 / num_merged)))

    return project
