"""Phi-4-multimodal's images: each square of results of SigLIP is a row of the prompt, and learned rows end lines."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.add import add
from octavo.kernels.pointwise import scale
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.models.checkpoint import Values, renamed
from octavo.worker_proc.models.hf_config import optional
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.clip import (
    SIGLIP_DEFAULTS,
    ClipConfig,
    SiglipEmbedding,
    clip_ignored,
    clip_layers,
    clip_rules,
)
from octavo.worker_proc.models.vision.tower import (
    Floats,
    MediaTower,
    MergedProjection,
    Patches,
    TowerSpec,
    array_of,
    order_by_square,
    square_patches,
)

EMBEDDING = "embed_tokens_extend."
_SQUARE = 4
"""Number of patches of a square, which becomes a prompt row."""
_DEFAULTS = {
    **SIGLIP_DEFAULTS,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
_NAMES = {
    r"^img_projection_up\.": "projector.fc1.",
    r"^img_projection_down\.": "projector.fc2.",
    r"^(global|sub)_img_feature_extensor$": r"\1_end",
}


class Phi4Tower(MediaTower):
    """The tower with its projector."""

    clip: ClipConfig

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: one sequence for the overview, and one per tile.

        Raises:
            ProtocolError: these are not the tensors of one image.
        """
        (tiles_NCHW, *others) = array_of(tensors, "image_pixel_values", np.float32, 5)
        masks = self._masks(tensors)
        size = len(masks), self.clip.num_channels, self.clip.image_size, self.clip.image_size
        if others or tiles_NCHW.shape != size:
            raise ProtocolError(f"image_pixel_values of shape {(1 + len(others), *tiles_NCHW.shape)}, not {(1, *size)}")
        shown = [_shown(mask) for mask in masks]
        return [self._sequence(tile, *sizes) for tile, sizes in zip(tiles_NCHW, shown, strict=True)]

    def _masks(self, tensors: Mapping[str, MediaTensor]) -> Floats:
        (masks, *others) = array_of(tensors, "image_attention_mask", np.float32, 4)
        if others or masks.shape[1:] != (self.clip.side, self.clip.side):
            raise ProtocolError(f"image_attention_mask of shape {(1 + len(others), *masks.shape)}")
        found: Floats = masks
        return found

    def _sequence(self, tile_CHW: Floats, height: int, width: int) -> Patches:
        """Return the patches in order of squares. Patches that show a margin are not attended to."""
        side = self.clip.side
        order_T = order_by_square(side, 2)
        rows_T, columns_T = order_T // side, order_T % side
        order_T = order_T[(rows_T - rows_T % 2 < height) & (columns_T - columns_T % 2 < width)]
        is_shown = (order_T // side < height) & (order_T % side < width)
        positions = places_in(side, height)[:, None] * side + places_in(side, width)
        placed = np.zeros((side, side), dtype=np.int64)
        placed[:height, :width] = positions
        seen_first_T = np.argsort(~is_shown, kind="stable")
        chosen_R = np.argsort(seen_first_T)
        taken_T = order_T[seen_first_T]
        return Patches(
            square_patches(tile_CHW, self.clip.patch_size)[taken_T],
            placed.ravel()[taken_T],
            chosen_R,
            num_keys=int(is_shown.sum()),
        )

    def arrange(self, rows_RD: Tensor, tensors: Mapping[str, MediaTensor]) -> Tensor:
        """See `MediaTower.arrange`: lines of the full image, a learned row, and lines of the overview.

        Raises:
            ProtocolError: the sizes of the picture and of its tiles differ.
        """
        ((height, width),) = array_of(tensors, "image_sizes", np.int64, 2).tolist()
        shown = [_shown(mask) for mask in self._masks(tensors)]
        rows, columns = height // self.clip.image_size, width // self.clip.image_size
        if rows * columns != len(shown) - 1:
            raise ProtocolError(f"{len(shown) - 1} tiles of an image of {rows} x {columns}")
        sizes = [((tall + 1) // 2, (wide + 1) // 2) for tall, wide in shown]
        *pieces, (middle_D, end_D) = rows_RD.split([*(tall * wide for tall, wide in sizes), 2])
        overview, *tiles = [piece.reshape(*size, -1) for piece, size in zip(pieces, sizes, strict=True)]
        lines = [torch.cat(tiles[row * columns :][:columns], dim=1) for row in range(rows)]
        whole = _ended(torch.cat(lines), end_D)
        return torch.cat([whole, middle_D[None], _ended(overview, end_D)])


def _shown(mask: Floats) -> tuple[int, int]:
    """Return the numbers of patch rows and columns of a tile that show the image; the others are a margin.

    Raises:
        ProtocolError: the mask is not a rectangle at the top left.
    """
    height, width = int(mask[:, 0].sum()), int(mask[0].sum())
    if not (height and width and mask[:height, :width].all() and mask.sum() == height * width):
        raise ProtocolError("image_attention_mask: the patches that show an image are not a rectangle")
    return height, width


def _ended(lines: Tensor, end_D: Tensor) -> Tensor:
    """Return the rows of lines, with one more row after each line."""
    return torch.cat([lines, end_D.expand(len(lines), 1, -1)], dim=1).flatten(0, 1)


def places_in(whole: int, num_shown: int) -> Ints:
    """Return the indices of patches on one axis of a position table with `whole` entries.

    Fractions are compared in float32, as in training.
    """
    boundaries = torch.arange(1 / whole, 1.0, 1 / whole)
    fractions = torch.arange(num_shown, dtype=torch.float32) * (1.0 / torch.tensor(num_shown))
    places: Ints = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True).numpy()
    return places


def build(spec: TowerSpec) -> Phi4Tower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    section: dict[str, Any] = spec.facts.hf_config.get("vision_config") or {}
    own = ("crop_size", "feature_layer", "image_token_id")
    clip = ClipConfig.read(section, _DEFAULTS, has_class_token=False, unused=own)
    tile_size, layer = optional(section, "crop_size", 448), optional(section, "feature_layer", -2)
    if tile_size != clip.image_size or clip.side % 2:
        raise ConfigError(
            f"config.json: 'crop_size' of 'vision_config' is {tile_size}, with pictures of {clip.image_size} pixels; "
            f"expected the same, and an even number of patches"
        )
    num_layers = layer if layer >= 0 else clip.num_layers + 1 + layer
    if not 0 < num_layers <= clip.num_layers:
        raise ConfigError(f"config.json: 'feature_layer' of 'vision_config' is {layer}; expected one of the layers")
    parameters = Parameters(
        spec.placement,
        prefixes=[
            f"{outer}{EMBEDDING}image_embed.{inner}" for outer in ("", "model.") for inner in ("", "img_processor.")
        ],
        ignored=[r"^head\.", r"\baudio_embed\.", *clip_ignored(num_layers, clip.num_layers)],
        rules=[*clip_rules(), renamed(_NAMES), _flat_ends],
    )
    ends_XD = parameters.stacked("ends", {"global_end": 1, "sub_end": 1}, clip.width)
    projector = Mlp(
        parameters,
        "projector",
        clip.width,
        spec.width,
        num_outputs=spec.width,
        activation="gelu",
        has_bias=True,
    )
    tower = Phi4Tower(
        parameters,
        [clip.shape] * num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=SiglipEmbedding(parameters, clip),
        layers=clip_layers(parameters, clip, num_layers),
        project=lambda rows: rows,
        library=spec.library,
        merged=MergedProjection(_SQUARE, _mean_projector(projector, clip.width), learned_XD=ends_XD),
    )
    tower.clip = clip
    return tower


def _flat_ends(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Make the learned rows matrices of one row."""
    yield name, values.reshape(1, -1) if isinstance(values, Tensor) and name.endswith("_end") else values


def _mean_projector(projector: Mlp, width: int) -> Callable[[Tensor], Tensor]:
    def project(squares: Tensor) -> Tensor:
        total = reduce(add, squares.split([width] * _SQUARE, dim=1))
        return projector(scale(total, 1 / _SQUARE))

    return project
