"""Tiles of Phi-4-multimodal's images, against torch, and numbers of rows that its processor in `transformers` gave."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_media import picture
from torch.nn.functional import interpolate

from octavo.frontend.media.phi4 import Phi4Tiles, num_rows

SETTINGS: dict[str, Any] = {"size": {"height": 64, "width": 64}, "patch_size": 2, "dynamic_hd": 6}
SIZES = [
    (44, 33, 477),
    (20, 60, 385),
    (90, 20, 504),
    (30, 30, 545),
    (64, 64, 545),
    (65, 64, 561),
    (200, 130, 1792),
    (500, 90, 1713),
    (90, 500, 1786),
    (128, 65, 834),
    (33, 129, 945),
    (300, 299, 1329),
    (64, 128, 817),
]
"""Width and height, and rows: recorded with torchvision."""


@pytest.mark.parametrize(("width", "height", "rows"), SIZES)
def test_tiles(width: int, height: int, rows: int) -> None:
    """A picture is stretched into its tiles, and the overview is made of its normalized pixels."""
    made = Phi4Tiles.read(SETTINGS)(shown := picture(3, width, height))
    assert num_rows(made) == rows
    (tiles,), (masks,) = made["image_pixel_values"], made["image_attention_mask"]
    ((whole_height, whole_width),) = made["image_sizes"]
    columns = whole_width // 64
    whole = tiles[1:].reshape(-1, columns, 3, 64, 64).transpose(2, 0, 3, 1, 4).reshape(3, whole_height, whole_width)
    scale = min(whole_width / width, whole_height / height)
    size = (whole_height, int(width * scale)) if scale == whole_height / height else (int(height * scale), whole_width)
    pixels = torch.from_numpy(np.array(shown)).permute(2, 0, 1)[None].float()
    inner = interpolate(pixels, size, mode="bilinear", antialias=True)[0].round().numpy()
    assert np.abs((whole * 127.5 + 127.5)[:, : size[0], : size[1]] - inner).max() < 1.01, "one level, as rounding does"
    assert (whole[:, size[0] :] == 1).all() and (whole[:, :, size[1] :] == 1).all(), "margins are white"
    overview = interpolate(torch.from_numpy(whole)[None], (64, 64), mode="bicubic")[0].numpy()
    np.testing.assert_allclose(tiles[0], overview, atol=1e-5)
    mask = masks[1:].reshape(-1, columns, 32, 32).transpose(0, 2, 1, 3).reshape(whole_height // 2, whole_width // 2)
    shown_rows, shown_columns = (
        len(mask) - (whole_height - size[0]) // 2,
        mask.shape[1] - (whole_width - size[1]) // 2,
    )
    assert masks[0].all() and mask[:shown_rows, :shown_columns].all() and mask.sum() == shown_rows * shown_columns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 64, "width": 32}}, "expected squares"),
        ({"patch_size": 64}, "an even number of patches of 64"),
        ({"do_normalize": False}, "do_normalize is false"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Phi4Tiles.read({**SETTINGS, **changes})


def test_arguments_of_requests() -> None:
    processor = Phi4Tiles.read(SETTINGS)
    assert num_rows(processor.with_kwargs({"dynamic_hd": 1})(picture(3, 200, 130))) < 545
    for kwargs, message in (
        ({"dynamic_hd": 0}, "a number of tiles"),
        ({"dynamic_hd": 65}, "a number of tiles from 1 to 64"),
        ({"size": 3}, "has size, .* knows dynamic_hd"),
    ):
        with pytest.raises(ValueError, match=message):
            processor.with_kwargs(kwargs)
    with pytest.raises(ValueError, match="2000 x 3 pixels are too long and too thin"):
        processor(picture(3, 2000, 3))
