"""Images of Phi-4-multimodal, whose processor in `transformers` needs torchvision: an overview, then tiles."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.frontend.media.tiles import Floats, TileImages, TileProcessor
from octavo.frontend.media.wire import Setup

if TYPE_CHECKING:
    from PIL import Image

ARCHITECTURE = "Phi4MultimodalForCausalLM"
_LEAST_PIXELS = 10
"""Minimum length in pixels of each side of the picture within its tiles."""
_BICUBIC = 3
"""Code of the bicubic filter in processor files; used for the overview."""
_CUBIC = -0.75
"""Parameter of the bicubic kernel."""


class Phi4Images(TileImages):
    """See `TileImages`."""

    def __init__(self, setup: Setup) -> None:
        """See `TileImages`."""
        super().__init__(setup, Phi4Tiles)
        self.placeholder_id = setup.token_id
        self.placeholder = self.tokenizer.convert_ids_to_tokens(setup.token_id)

    def inputs(self, picture: "Image.Image", tiles: "Phi4Tiles") -> dict[str, Any]:
        """See `TileImages.inputs`."""
        tensors = tiles(picture)
        return with_placeholders(tensors, self.placeholder, self.placeholder_id, num_rows(tensors))


def with_placeholders(tensors: Mapping[str, Any], placeholder: str, token_id: int, num_rows: int) -> dict[str, Any]:
    """Return the tensors of an item and the placeholders of its rows, in the form of a processor of `transformers`."""
    return {
        **tensors,
        "input_ids": np.full((1, num_rows), token_id),
        "text_replacement_offsets": [[{"replacement": placeholder * num_rows}]],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi4Tiles(TileProcessor):
    """See `TileProcessor`.

    Args:
        patch_size: side of a patch in pixels.
    """

    default_side, default_tiles, tiles_key = 448, 36, "dynamic_hd"
    needed_steps, resample = ("do_rescale", "do_normalize"), _BICUBIC

    patch_size: int

    @classmethod
    def own_settings(cls, settings: Mapping[str, Any], side: int) -> dict[str, Any]:
        """See `TileProcessor.own_settings`."""
        patch_size = settings.get("patch_size", 14)
        if side % (2 * patch_size):
            raise ValueError(
                f"preprocessor_config.json: size is {side} x {side}; expected an even number of patches of {patch_size}"
            )
        return {"patch_size": patch_size}

    def __call__(self, picture: "Image.Image") -> dict[str, Any]:
        """Return the tensors of an RGB picture, with the overview as the first tile.

        Raises:
            ValueError: the picture is too long and thin.
        """
        whole, margins = self._whole(picture)
        rows, columns = (pixels // self.side for pixels in whole.shape[1:])
        patches = self.side // self.patch_size
        mask = np.ones((rows * patches, columns * patches), dtype=np.float32)
        for axis, margin in enumerate(margins):
            mask.swapaxes(0, axis)[mask.shape[axis] - margin // self.patch_size :] = 0
        overview = resized(whole, self.side)
        tiles = whole.reshape(-1, rows, self.side, columns, self.side).transpose(1, 3, 0, 2, 4)
        masks = mask.reshape(rows, patches, columns, patches).swapaxes(1, 2).reshape(-1, patches, patches)
        return {
            "image_pixel_values": np.concatenate([overview[None], tiles.reshape(-1, *overview.shape)])[None],
            "image_sizes": np.array([whole.shape[1:]], dtype=np.int64),
            "image_attention_mask": np.concatenate([np.ones_like(masks[:1]), masks])[None],
        }

    def _whole(self, picture: "Image.Image") -> tuple[Floats, tuple[int, int]]:
        """Return the pixels of all tiles as one image, and its bottom and right margins in pixels."""
        from PIL import Image

        width, height = picture.size
        columns, rows = self._grid(width, height)
        whole_width, whole_height = self.side * columns, self.side * rows
        stretch_x, stretch_y = whole_width / width, whole_height / height
        inner_width, inner_height = whole_width, int(height * stretch_x)
        if stretch_x >= stretch_y:
            inner_width, inner_height = int(width * stretch_y), whole_height
        if min(inner_width, inner_height) < _LEAST_PIXELS:
            raise ValueError(f"{width} x {height} pixels are too long and too thin")
        pixels = np.full((whole_height, whole_width, 3), 255, dtype=np.uint8)
        inner = picture.resize((inner_width, inner_height), Image.Resampling.BILINEAR)
        pixels[:inner_height, :inner_width] = np.asarray(inner)
        mean, deviation = ((np.array(one) / self.scale).astype(np.float32) for one in (self.mean, self.deviation))
        whole = (pixels.astype(np.float32) - mean) / deviation
        return np.ascontiguousarray(whole.transpose(2, 0, 1)), (whole_height - inner_height, whole_width - inner_width)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the grid (columns, rows) of tiles: enough for every pixel, or the grid with the closest aspect
        ratio.
        """
        columns, rows = math.ceil(width / self.side), math.ceil(height / self.side)
        if columns * rows <= self.max_tiles:
            return columns, rows
        best, least = (1, 1), math.inf
        for number in range(1, self.max_tiles + 1):
            for columns in (one for one in range(1, number + 1) if number % one == 0):
                rows = number // columns
                difference = abs(width / height - columns / rows)
                is_filled = width * height > 0.5 * self.side * self.side * columns * rows
                if difference < least or (difference == least and is_filled):
                    best, least = (columns, rows), difference
        return best


def num_rows(tensors: Mapping[str, Any]) -> int:
    """Return the number of prompt rows of a picture: squares of four patches, line ends, and one separator."""
    mask = tensors["image_attention_mask"][0]
    (height, width), tile = tensors["image_sizes"][0].tolist(), tensors["image_pixel_values"].shape[-1]
    side = int(mask.shape[-1]) // 2
    squares = mask[1:, ::2, ::2].reshape(height // tile, width // tile, side, side)
    lines = int(squares[:, 0, :, 0].sum())
    return int(squares.sum()) + lines + 1 + side * (side + 1)


def resized(picture: Floats, side: int) -> Floats:
    """Return a square picture, shape CHW, resized with a bicubic filter (four by four pixels)."""
    result = picture
    for axis in (1, 2):
        scale = np.float32(result.shape[axis] / side)
        places = scale * (np.arange(side, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5)
        first = np.floor(places)
        offsets = places - first
        shape = [1, 1, 1]
        shape[axis] = side
        total = np.zeros_like(result.take(np.zeros(side, dtype=np.int64), axis=axis))
        for tap in range(-1, 3):
            weights = _weights(np.abs(offsets - np.float32(tap))).reshape(shape)
            total += result.take(np.clip(first.astype(np.int64) + tap, 0, result.shape[axis] - 1), axis=axis) * weights
        result = total
    return result


def _weights(distances: Floats) -> Floats:
    """Return the bicubic kernel at distances up to 2."""
    near = ((_CUBIC + 2) * distances - (_CUBIC + 3)) * distances * distances + 1
    far = ((_CUBIC * distances - 5 * _CUBIC) * distances + 8 * _CUBIC) * distances - 4 * _CUBIC
    weights: Floats = np.where(distances <= 1, near, far).astype(np.float32)
    return weights
