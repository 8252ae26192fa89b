"""SmolVLM's videos: numbers in words, and which frames of a file are read."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor, get_resize_output_image_size
from transformers.video_utils import VideoMetadata

from octavo.frontend.media.picture_videos import _with_longest, smolvlm_frames
from octavo.frontend.media.smolvlm import in_words


def test_numbers_in_words() -> None:
    assert {number: in_words(number) for number in (0, 13, 20, 64, 100, 101, 768, 1000, 1006, 2100, 12345)} == {
        0: "zero",
        13: "thirteen",
        20: "twenty",
        64: "sixty-four",
        100: "one hundred",
        101: "one hundred and one",
        768: "seven hundred and sixty-eight",
        1000: "one thousand",
        1006: "one thousand and six",
        2100: "two thousand, one hundred",
        12345: "twelve thousand, three hundred and forty-five",
    }


@pytest.mark.parametrize(
    ("num_frames", "fps", "most", "wanted_fps"),
    [
        (100, 25.0, 64, 1),
        (3000, 29.97, 64, 1),
        (1, 30.0, 64, 1),
        (500, 5.0, 8, 2),
        (90, 30.0, 64, 24),
        (40, 4.0, 4, 1),
        (90, 30.0, 10**4, 50),
        (500, 5.0, 600, 7),
    ],
)
def test_frames_are_those_of_transformers(num_frames: int, fps: float, most: int, wanted_fps: float) -> None:
    sample: Any = SmolVLMVideoProcessor.sample_frames
    metadata = VideoMetadata(num_frames, fps, duration=num_frames / fps)
    expected = sample(SimpleNamespace(), metadata, num_frames=most, fps=wanted_fps)
    assert smolvlm_frames(num_frames, fps, most, wanted_fps).indices == expected.tolist()


def test_all_frames() -> None:
    assert smolvlm_frames(5, 1.0, -1, -1.0).indices == [0, 1, 2, 3, 4]
    assert smolvlm_frames(5, 1.0, 10**18, 1e18).indices == [0, 1, 2, 3, 4]
    assert smolvlm_frames(5, 1.0, 3, 1e308).indices == [0, 2, 4]


@pytest.mark.parametrize("size", [(640, 480), (480, 641), (31, 30), (1000, 1), (7, 7)])
def test_sides_of_frames_are_those_of_transformers(size: tuple[int, int]) -> None:
    width, height = size
    frames: Any = SimpleNamespace(size=lambda: (0, height, width))
    expected_height, expected_width = get_resize_output_image_size(frames, 1456)
    assert _with_longest(size, 1456) == (expected_width, expected_height)
