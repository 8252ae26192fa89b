"""Images of Llama 4, whose processor in `transformers` needs torchvision: tiles, followed by the complete image as
a tile.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from octavo.frontend.media.tiles import Floats, TileImages, TileProcessor
from octavo.frontend.media.wire import Setup

if TYPE_CHECKING:
    from PIL import Image

ARCHITECTURE = "Llama4ForConditionalGeneration"
_BILINEAR = 2
"""Code of the bilinear filter in processor files."""
_PLACEHOLDER, _START, _END, _ROW = "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"
_BETWEEN_COLUMNS, _AFTER_LINE = "<|tile_x_separator|>", "<|tile_y_separator|>"


class Llama4Images(TileImages):
    """See `TileImages`."""

    def __init__(self, setup: Setup) -> None:
        """See `TileImages`. The settings of the text must agree with those of the tiles."""
        super().__init__(setup, Llama4Tiles)
        from transformers import ProcessorMixin

        of_text, _ = ProcessorMixin.get_processor_dict(setup.processor_path, local_files_only=True)
        self._rows_per_tile = rows_per_tile(self.tiles.side, of_text)
        self.placeholder = _PLACEHOLDER
        self.placeholder_id = self.tokenizer.convert_tokens_to_ids(_PLACEHOLDER)
        if self.tokenizer.convert_tokens_to_ids(_ROW) != setup.token_id:
            raise ValueError(f"image_token_index of config.json is {setup.token_id}, which is not the token {_ROW}")

    def inputs(self, picture: "Image.Image", tiles: "Llama4Tiles") -> dict[str, Any]:
        """See `TileImages.inputs`."""
        pixels, grid = tiles(picture)
        text = text_of(grid, self._rows_per_tile)
        token_ids = self.tokenizer(text, add_special_tokens=False, return_tensors="np")["input_ids"]
        offsets = [[{"replacement": text}]]
        return {"pixel_values": pixels, "input_ids": token_ids, "text_replacement_offsets": offsets}


def rows_per_tile(side: int, settings: Mapping[str, Any]) -> int:
    """Return the number of prompt rows of a tile, given the settings of the processor.

    Raises:
        ValueError: the number is not an integer.
    """
    patch_size, ratio = int(settings.get("patch_size", 14)), float(settings.get("pixel_shuffle_ratio", 0.5))
    num_merged = round(1.0 / ratio**2)
    if side % patch_size or (side // patch_size) ** 2 % num_merged:
        raise ValueError(
            f"processor_config.json: tiles of {side} pixels in patches of {patch_size}, {num_merged} a row"
        )
    return (side // patch_size) ** 2 // num_merged


def text_of(grid: tuple[int, int], num_rows: int) -> str:
    """Return the prompt text of an image with a grid of (lines, columns) of tiles."""
    lines, columns = grid
    tile = _ROW * num_rows
    line = _BETWEEN_COLUMNS.join([tile] * columns) + _AFTER_LINE
    return f"{_START}{line * lines if lines * columns > 1 else ''}{_PLACEHOLDER}{tile}{_END}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Tiles(TileProcessor):
    """See `TileProcessor`.

    Args:
        fills_canvas: enlarge pictures to fill their tiles.
    """

    default_side, default_tiles, tiles_key = 336, 16, "max_patches"
    further_kwargs = ("resize_to_max_canvas",)
    needed_steps, resample = ("do_resize", "do_rescale", "do_normalize"), _BILINEAR

    fills_canvas: bool

    @classmethod
    def own_settings(cls, settings: Mapping[str, Any], side: int) -> dict[str, Any]:
        """See `TileProcessor.own_settings`."""
        return {"fills_canvas": settings.get("resize_to_max_canvas", False)}

    def own_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """See `TileProcessor.own_kwargs`."""
        fills_canvas = kwargs.get("resize_to_max_canvas")
        if fills_canvas is not None and type(fills_canvas) is not bool:
            raise ValueError(f"resize_to_max_canvas is {fills_canvas!r}; expected true or false")
        return {} if fills_canvas is None else {"fills_canvas": fills_canvas}

    def __call__(self, picture: "Image.Image") -> tuple[Floats, tuple[int, int]]:
        """Return the tiles of an RGB picture, shape NCHW, and their grid (lines, columns).

        If there are several tiles, the complete picture follows as the last one.
        """
        lines, columns = grid = self._grid(picture.width, picture.height)
        height, width = self._inner_size(picture.width, picture.height, grid)
        pixels = np.zeros((lines * self.side, columns * self.side, 3), dtype=np.uint8)
        pixels[:height, :width] = self._resized(picture, width, height)
        tiles = self._normalized(pixels).reshape(3, lines, self.side, columns, self.side)
        tiles = tiles.transpose(1, 3, 0, 2, 4).reshape(-1, 3, self.side, self.side)
        if lines * columns > 1:
            whole = self._normalized(self._resized(picture, self.side, self.side))
            tiles = np.concatenate([tiles, whole[None]])
        return np.ascontiguousarray(tiles), grid

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the best grid (lines, columns) of tiles.

        The best grid enlarges the picture least, or else shrinks it least; ties are resolved in favor of the smallest
        canvas. Scales are compared in float32, as `transformers` does.
        """
        grids = _grids(self.max_tiles)
        sizes = np.array(grids, dtype=np.int64) * self.side
        scales = (sizes.astype(np.float32) / np.array([height, width], dtype=np.float32)).min(axis=1)
        enlarging = scales[scales >= 1]
        chosen = scales.max() if self.fills_canvas or not len(enlarging) else enlarging.min()
        places = np.flatnonzero(scales == chosen)
        return grids[int(places[np.argmin(sizes[places].prod(axis=1))])]

    def _inner_size(self, width: int, height: int, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the picture within its tiles, with its aspect ratio."""
        most_height, most_width = (
            self._limit(length, number * self.side) for length, number in zip((height, width), grid, strict=True)
        )
        stretch_x, stretch_y = most_width / width, most_height / height
        if stretch_x < stretch_y:
            height, width = min(math.floor(height * stretch_x), int(most_height)), int(most_width)
        else:
            height, width = int(most_height), min(math.floor(width * stretch_y), int(most_width))
        return max(height, 1), max(width, 1)

    def _limit(self, length: int, most: int) -> int | np.float32:
        """Return the maximum length of a side, in pixels. The sides of canvases are float32 in `transformers`."""
        wanted = most if self.fills_canvas else max(length, self.side)
        return np.float32(most) if self.fills_canvas or most < wanted else wanted

    def _resized(self, picture: "Image.Image", width: int, height: int) -> npt.NDArray[np.uint8]:
        from PIL import Image

        return np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))

    def _normalized(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """Return normalized pixels, shape CHW, of pixels of shape HWC.

        The numbers are rounded to bfloat16 after each operation, as in the training of the model.
        """
        levels = _rounded(np.arange(256, dtype=np.float32) * np.float32(self.scale))
        channels = []
        for channel, (mean, deviation) in enumerate(zip(self.mean, self.deviation, strict=True)):
            shifted = _rounded(levels - _rounded(np.float32(mean)))
            channels.append(_rounded(shifted / _rounded(np.float32(deviation)))[pixels[:, :, channel]])
        return np.stack(channels)


def _grids(max_tiles: int) -> list[tuple[int, int]]:
    """Return the grids (lines, columns) of all canvases of up to `max_tiles` tiles; equal aspect ratios are
    adjacent.
    """
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for number in range(max_tiles, 0, -1):
        for lines in (one for one in range(1, number + 1) if number % one == 0):
            by_shape.setdefault(lines / (number // lines), []).append((lines, number // lines))
    return [grid for grids in by_shape.values() for grid in grids]


def _rounded(numbers: Any) -> Any:
    """Round numbers to bfloat16, and return them as float32."""
    bits = np.asarray(numbers, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)
