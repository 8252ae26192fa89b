"""LLaVA-NeXT and LLaVA-OneVision: an overview of an image and its tiles, with a learned row at each line's end."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.hf_config import CheckedConfig, optional, required
from octavo.worker_proc.models.vision.llava import LlavaTower, assemble
from octavo.worker_proc.models.vision.tower import Patches, TowerSpec, array_of, pixels_of

Size = tuple[int, int]
"""Height and width."""
FRAMES = "pixel_values_videos"
_MAX_STRETCH = 1.1
"""An image that exceeds the limit by less than this factor, on each side, keeps all rows."""


class TiledTower(LlavaTower):
    """The tower with its projector."""

    newline_D: Tensor
    sizes: Sequence[Size]
    """Sizes in pixels that images are resized to; each is a whole number of tiles."""
    max_tiles: int
    """Rows of more than this many tiles are interpolated; 0: no limit."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: one sequence for the overview and one per tile; or one per frame."""
        if FRAMES in tensors:
            frames_NCHW = array_of(tensors, FRAMES, np.float32, 4)
            return [self.clip.sequence(frame_CHW, first=self.first) for frame_CHW in frames_NCHW]
        (tiles_NCHW, *others) = pixels_of(tensors, "pixel_values", 5)
        if others:
            raise ProtocolError(f"{1 + len(others)} images in place of one")
        return [self.clip.sequence(tile_CHW, first=self.first) for tile_CHW in tiles_NCHW]

    def arrange(self, rows_RD: Tensor, tensors: Mapping[str, MediaTensor]) -> Tensor:
        """See `MediaTower.arrange`: without the rows of margins that were added to the image."""
        if FRAMES in tensors:
            return self._arrange_frames(rows_RD, tensors)
        ((height, width),) = array_of(tensors, "image_sizes", np.int64, 2).tolist()
        side = self.clip.side
        rows, columns = (pixels // self.clip.image_size for pixels in best_size((height, width), self.sizes))
        if len(rows_RD) != (1 + rows * columns) * (side**2 + self.clip.has_class_token - self.first):
            raise ProtocolError(f"{len(rows_RD)} rows of an image of {rows} x {columns} tiles")
        num_each = len(rows_RD) // (1 + rows * columns)
        overview_RD, tiles_RD = rows_RD.split([num_each, len(rows_RD) - num_each])
        tiles = tiles_RD.reshape(rows, columns, side, side, -1).swapaxes(1, 2)
        inner = without_margins(tiles.reshape(rows * side, columns * side, -1), (height, width))
        inner = self._limited(inner)
        newlines = self.newline_D.to(inner.dtype).expand(len(inner), 1, -1)
        return torch.cat([overview_RD, torch.cat([inner, newlines], dim=1).flatten(0, 1)])

    def _arrange_frames(self, rows_RD: Tensor, tensors: Mapping[str, MediaTensor]) -> Tensor:
        """Return fewer rows of each frame, and the learned row after the last frame of a video."""
        is_last = array_of(tensors, "is_last", np.int64, 1)
        side = self.clip.side
        if len(rows_RD) != len(is_last) * side**2:
            raise ProtocolError(f"{len(rows_RD)} rows of {len(is_last)} frames with {side} x {side} patches")
        half = -(-side // 2)
        parts = [  # one by one: the bits of a frame must not depend on others
            _interpolated(frame, (half, half)).flatten(0, 1) for frame in rows_RD.reshape(len(is_last), side, side, -1)
        ]
        return torch.cat([*parts, *[self.newline_D.to(rows_RD.dtype)[None]] * int(is_last[-1])])

    def _limited(self, rows: Tensor) -> Tensor:
        """Return the rows of a plane, shape (height, width, D), interpolated to fewer rows if they exceed the limit."""
        if not self.max_tiles:
            return rows
        height, width, _ = rows.shape
        ratio = float((height * width / (self.max_tiles * self.clip.side**2)) ** 0.5)
        if ratio <= _MAX_STRETCH:
            return rows
        return _interpolated(rows, (int(height // ratio), int(width // ratio)))


def _interpolated(rows: Tensor, size: Size) -> Tensor:
    """Return the rows of a plane, interpolated to another size: shape (height, width, D)."""
    planes = rows.float().permute(2, 0, 1).contiguous()[None]
    return torch.nn.functional.interpolate(planes, size, mode="bilinear")[0].permute(1, 2, 0).to(rows.dtype)


def best_size(size: Size, sizes: Sequence[Size]) -> Size:
    """Return the size that shows the most pixels of an image, with the smallest margins; the first one of equals."""

    def merits(one: Size) -> tuple[int, int]:
        scale = min(one[1] / size[1], one[0] / size[0])
        shown = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return shown, shown - one[0] * one[1]

    return max(sizes, key=merits)


def without_margins(rows: Tensor, size: Size) -> Tensor:
    """Return the rows of a plane, shape (height, width, D), without those of the margins around an image."""
    height, width = rows.shape[:2]
    if size[1] / size[0] > width / height:
        margin = (height - int(round(size[0] * (width / size[1]), 7))) // 2
        return rows[margin : height - margin]
    margin = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    return rows[:, margin : width - margin]


def _sizes(config: CheckedConfig, tile_size: int) -> list[Size]:
    given: list[Any] = required(config, "image_grid_pinpoints", list)
    sizes = [(height, width) for height, width in given]
    if not sizes or any(pixels % tile_size or pixels < tile_size for size in sizes for pixels in size):
        raise ConfigError(f"config.json: 'image_grid_pinpoints' is {given!r}; expected multiples of {tile_size}")
    return sizes


def build(spec: TowerSpec) -> TiledTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    is_onevision = spec.facts.architecture.startswith("LlavaOnevision")
    tower = assemble(TiledTower, spec, config, -1 if is_onevision else -2)
    tower.newline_D = tower.parameters.new("image_newline", spec.width)
    tower.sizes = _sizes(config, tower.clip.image_size)
    form = optional(config, "vision_aspect_ratio", "anyres_max_9" if is_onevision else "anyres")
    limit = form.removeprefix("anyres_max_") if is_onevision else "0"
    if not limit.isdecimal():
        raise ConfigError(f"config.json: 'vision_aspect_ratio' is {form!r}; expected anyres_max_ and a number")
    tower.max_tiles = int(limit)
    config.reject_unread(spec.facts.architecture)
    return tower
