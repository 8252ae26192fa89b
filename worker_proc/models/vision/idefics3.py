"""Idefics3 and SmolVLM: tiles of an image through a SigLIP tower; each square of its results is a row of the prompt."""

from collections.abc import Mapping

import numpy as np
import torch

from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.clip import ClipConfig, SiglipEmbedding, clip_layers, clip_rules
from octavo.worker_proc.models.vision.tower import (
    MediaTower,
    MergedProjection,
    Patches,
    TowerSpec,
    array_of,
    order_by_square,
    pixels_of,
    square_patches,
)

_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_UNUSED = ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")
"""Unused keys of `vision_config`: image sizes come from the processor's files."""
MASK = "pixel_attention_mask"
_READ_ELSEWHERE = ("text_config", "vision_config", "image_token_id", "tie_word_embeddings", "_pad_token_id")


class Idefics3Tower(MediaTower):
    """The tower with its projector."""

    clip: ClipConfig
    scale: int
    """Number of patches on each side of a square, which becomes a prompt row."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: one sequence per tile or frame, its patches square by square."""
        images = pixels_of(tensors, "pixel_values", 5)
        tiles_NCHW = images.reshape(-1, *images.shape[2:])
        side = tiles_NCHW.shape[-1] // self.clip.patch_size
        if tiles_NCHW.shape[-1] != tiles_NCHW.shape[-2] or side % self.scale:
            raise ProtocolError(f"tiles of shape {tiles_NCHW.shape} for squares of {self.scale} patches")
        if MASK in tensors and not array_of(tensors, MASK, np.int64, 4).all():
            raise ProtocolError("tiles of one image are not padded")
        order_T = order_by_square(side, self.scale)
        positions_T, all_T = self._positions(side)[order_T], np.arange(side * side)
        return [
            Patches(square_patches(tile_CHW, self.clip.patch_size)[order_T], positions_T, all_T)
            for tile_CHW in tiles_NCHW
        ]

    def _positions(self, side: int) -> Ints:
        """Return the position-table row of each patch of a tile with `side` patches on each side.

        The table has another resolution; fractions are compared in float32, as in training.
        """
        whole = self.clip.side
        boundaries = torch.arange(1 / whole, 1.0, 1 / whole)
        fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
        places = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
        positions: Ints = (places[:, None] * whole + places).ravel().numpy()
        return positions


def build(spec: TowerSpec) -> Idefics3Tower:
    """Make the tower; see `octavo.worker_proc.models.vision.llava.build`.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *_READ_ELSEWHERE)
    clip = ClipConfig.read(config["vision_config"], _DEFAULTS, has_class_token=False, unused=_UNUSED)
    scale = optional(config, "scale_factor", 2)
    config.reject_unread(spec.facts.architecture)
    if clip.side % scale:
        raise ConfigError(f"config.json: a scale_factor of {scale} does not divide the patches of an image")
    prefixes = [f"{outer}{inner}." for outer in ("", "model.") for inner in ("vision_model", "connector")]
    parameters = Parameters(spec.placement, prefixes=prefixes, ignored=[r"position_ids$"], rules=clip_rules())
    merged_width = clip.width * scale**2
    tower = Idefics3Tower(
        parameters,
        [clip.shape] * clip.num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=SiglipEmbedding(parameters, clip),
        layers=clip_layers(parameters, clip, clip.num_layers),
        project=LayerNorm.new(parameters, "post_layernorm", clip.width, clip.eps),
        library=spec.library,
        merged=MergedProjection(
            scale**2, Linear.new(parameters, "modality_projection.proj", merged_width, spec.width, bias=False)
        ),
    )
    tower.clip, tower.scale = clip, scale
    return tower
