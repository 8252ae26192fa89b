"""Tiles of Llama 4's images, against torch, and what its processor in `transformers` gave with torchvision."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_media import picture
from torch.nn.functional import interpolate
from transformers.models.llama4.processing_llama4 import Llama4Processor

from octavo.frontend.media.llama4 import Llama4Tiles, rows_per_tile, text_of

SETTINGS: dict[str, Any] = {"size": {"height": 24, "width": 24}, "max_patches": 6}
RECORDED = [
    (44, 33, (2, 2), -2588.12, (2, 3), -1203.39),
    (20, 60, (3, 1), -1600.91, (3, 1), -18.7),
    (90, 20, (1, 4), -1562.16, (1, 5), -928.02),
    (30, 30, (2, 2), -4164.41, (2, 2), 103.54),
    (24, 24, (1, 1), 16.57, (2, 2), 99.88),
    (48, 47, (2, 2), -141.46, (2, 3), -3305.14),
    (200, 130, (2, 3), -407.46, (2, 3), -407.46),
    (500, 90, (1, 6), -770.03, (1, 6), -770.03),
    (1, 300, (6, 1), -9938.38, (6, 1), -9938.38),
    (7, 5, (1, 1), -676.05, (2, 3), -2332.64),
]
"""Width and height; lines and columns of tiles and the sum of all numbers; the same with `resize_to_max_canvas`."""


@pytest.mark.parametrize(("width", "height", "grid", "total", "full_grid", "full_total"), RECORDED)
def test_tiles(
    width: int, height: int, grid: tuple[int, int], total: float, full_grid: tuple[int, int], full_total: float
) -> None:
    """A picture lies at the top left of its tiles, and the last tile is the whole picture."""
    shown = picture(3, width, height)
    for fills_canvas, expected, numbers in ((False, grid, total), (True, full_grid, full_total)):
        tiles, found = Llama4Tiles.read(SETTINGS).with_kwargs({"resize_to_max_canvas": fills_canvas})(shown)
        assert found == expected
        assert tiles.sum(dtype=np.float64) == pytest.approx(numbers, abs=1e-3 * tiles.size)
    pixels = torch.from_numpy(np.array(shown)).permute(2, 0, 1)[None].float()
    whole = interpolate(pixels, (24, 24), mode="bilinear", antialias=True)[0].numpy() / 127.5 - 1
    if full_grid != (1, 1):
        assert np.abs(tiles[-1] - whole).max() < 1.6 / 127.5, "one level, and the rounding to bfloat16"


def test_the_text_of_an_image() -> None:
    for grid in ((1, 1), (1, 3), (2, 1), (3, 2)):
        assert text_of(grid, 4) == Llama4Processor._prompt_split_image(None, grid, 4)
    assert rows_per_tile(336, {}) == 144


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 24, "width": 32}}, "expected squares"),
        ({"do_resize": False}, "do_resize is false"),
        ({"resample": 3}, "resample is 3; expected 2"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama4Tiles.read({**SETTINGS, **changes})


def test_arguments_of_requests() -> None:
    processor = Llama4Tiles.read(SETTINGS)
    assert len(processor.with_kwargs({"max_patches": 1})(picture(3, 200, 130))[0]) == 1
    for kwargs, message in (
        ({"max_patches": 0}, "a number of tiles from 1 to 64"),
        ({"resize_to_max_canvas": 1}, "expected true or false"),
        ({"size": 3}, "has size, .* knows max_patches, resize_to_max_canvas"),
    ):
        with pytest.raises(ValueError, match=message):
            processor.with_kwargs(kwargs)
    with pytest.raises(ValueError, match="tiles of 24 pixels in patches of 5"):
        rows_per_tile(24, {"patch_size": 5})
