"""Positions on several axes: from the grids of images, and as rotary angles."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from octavo.protocol.errors import ConfigError
from octavo.protocol.media import GridSpan, MediaItem, grids_of, media_fault
from octavo.worker_proc.batch.axes import AxisPositions, axes_of_grids
from octavo.worker_proc.batch.columns import SlotColumns
from octavo.worker_proc.models.layers.rotary import AxisRotary, Rotary, rotary_from_config


def test_positions_follow_the_longest_side_of_a_grid() -> None:
    """Two tokens, an image of 2 x 3 rows, a token, an image of 2 frames of 1 x 1, and text."""
    axes_AL, shift = axes_of_grids([GridSpan(2, [1, 2, 3]), GridSpan(9, [2, 1, 1])])
    assert axes_AL.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6],
    ]
    assert 11 + shift == 8, "the token after the second image"


def test_frames_are_as_far_apart_as_their_times() -> None:
    """One token, three frames of 1 x 2 rows that are 1.5 positions apart, and text after the last of them."""
    axes_AL, shift = axes_of_grids([GridSpan(1, [3, 1, 2], 1.5)])
    assert axes_AL.tolist() == [[0, 1, 1, 2, 2, 4, 4], [0, 1, 1, 1, 1, 1, 1], [0, 1, 2, 1, 2, 1, 2]]
    assert 7 + shift == 5
    frames = MediaItem([(1, 2), (6, 2)], bytes(32), {}, [2, 1, 2], kind="video")
    assert frames.grids == [GridSpan(1, [1, 1, 2]), GridSpan(6, [1, 1, 2])]
    assert media_fault([frames], 9, {"video"}) is None
    for changes in ({"grid": [1, 2, 2]}, {"spans": [(1, 3), (6, 1)]}, {"frame_step": 4e4}, {"frame_step": math.nan}):
        assert "grid" in str(media_fault([replace(frames, **changes)], 9, {"video"}))


def test_the_parts_of_a_video_are_one_grid() -> None:
    """Frames that are encoded in several steps count positions as those of one step."""
    first = MediaItem([(1, 4)], bytes(32), {}, [2, 1, 2], kind="video", frame_step=1.5)
    second = replace(first, spans=[(5, 2)], grid=[1, 1, 2], continues_grid=True)
    other = replace(first, spans=[(7, 4)])
    assert grids_of([first, second, other]) == [GridSpan(1, [3, 1, 2], 1.5), GridSpan(7, [2, 1, 2], 1.5)]
    assert media_fault([first, second, other], 12, {"video"}) is None
    for changes in ({"grid": [1, 2, 1]}, {"spans": [(6, 2)]}, {"frame_step": 1.0}, {"kind": "image"}):
        fault = media_fault([first, replace(second, **changes)], 12, {"video", "image"})
        assert "continue the grid" in str(fault)
    assert "continue the grid" in str(media_fault([second], 12, {"video"}))
    far = [replace(one, frame_step=3e4) for one in (first, second)]
    assert "65536 positions" in str(media_fault(far, 12, {"video"}))


def test_a_batch_of_requests_with_and_without_images() -> None:
    positions = AxisPositions(SlotColumns(3))
    positions.admit(1, [GridSpan(1, [1, 2, 2])])
    positions.admit(2, [])
    slots_T, positions_T = np.array([1, 1, 2, 1, 1]), np.array([3, 4, 7, 5, 90])
    assert positions.of(slots_T, positions_T).tolist() == [[1, 1, 7, 3, 88], [2, 2, 7, 3, 88], [1, 2, 7, 3, 88]]


def config(**rope: Any) -> dict[str, Any]:
    return {"rope_scaling": rope, "rope_theta": 100.0}


@pytest.mark.parametrize(
    ("rope", "axes"),
    [
        ({"type": "mrope", "mrope_section": [2, 3, 3]}, [0, 0, 1, 1, 1, 2, 2, 2]),
        ({"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}, [0, 1, 2, 0, 1, 2, 0, 0]),
    ],
)
def test_each_pair_rotates_by_its_axis(rope: dict[str, Any], axes: list[int]) -> None:
    rotary = rotary_from_config(config(**rope), 16)
    assert isinstance(rotary, AxisRotary)
    plain = Rotary.of(100.0, 8)
    for one in (rotary, plain):
        one.prepare(64 if one is plain else 8, torch.device("cpu"))
    rotary.take_steps(4, torch.device("cpu"))
    axes_AT = np.array([[3, 50], [7, 50], [9, 51]])
    rotary.put(axes_AT)
    for (_, table_XC), (_, expected_LC) in zip(
        rotary.lookups(torch.zeros(1)), plain.lookups(torch.zeros(1)), strict=True
    ):
        for row in range(2):
            wanted = [float(expected_LC[axes_AT[axis, row], pair]) for pair, axis in enumerate(axes)]
            assert table_XC[row].tolist() == wanted


@pytest.mark.parametrize("sections", [[8], [2, 3, 4], [2.0, 3, 3], "8"])
def test_sections_that_do_not_fit(sections: object) -> None:
    with pytest.raises(ConfigError, match="mrope_section"):
        rotary_from_config(config(type="mrope", mrope_section=sections), 16)
