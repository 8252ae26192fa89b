"""Bytes of pixels and their levels are exactly the numbers that processors of `transformers` make."""

from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from octavo.frontend.media.pixel_bytes import PixelBytes
from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import ProtocolError
from octavo.protocol.media import LEVELS, MediaTensor
from octavo.worker_proc.models.vision.tower import pixels_of

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (29, 40, 3), dtype=np.uint8))
SIDES: dict[str, Any] = {"size": {"height": 24, "width": 24}}
CLIP: dict[str, Any] = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
TILES: dict[str, Any] = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
FAMILIES: dict[str, dict[str, Any]] = {
    "CLIPImageProcessorPil": CLIP,
    "SiglipImageProcessorPil": SIDES,
    "LlavaNextImageProcessorPil": {**CLIP, "image_grid_pinpoints": [[24, 48], [48, 24]]},
    "LlavaOnevisionImageProcessorPil": {**SIDES, "image_grid_pinpoints": [[24, 48], [48, 24]]},
    "Gemma3ImageProcessorPil": SIDES,
    "GotOcr2ImageProcessorPil": {**SIDES, "crop_to_patches": True, "max_patches": 4},
    "Idefics3ImageProcessorPil": TILES,
    "SmolVLMImageProcessorPil": TILES,
    "PixtralImageProcessorPil": {"size": {"longest_edge": 48}, "patch_size": {"height": 6, "width": 6}},
    "Qwen2VLImageProcessorPil": {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 2048}},
}
OTHERS: list[dict[str, Any]] = [{}, {"do_normalize": False}, {"do_rescale": False}, {"image_mean": [0.1, 0.2, 0.3]}]
PADDED: dict[str, Any] = {"do_pad": True, "pad_size": {"height": 64, "width": 64}}
OTHERS += [PADDED, {**PADDED, "do_normalize": False, "do_rescale": False}]
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"do_rescale": 1}, "do_rescale must be true, false or null, not 1"),
    ({"do_normalize": "false"}, "do_normalize must be true, false or null, not 'false'"),
    ({"do_pad": "no"}, "do_pad must be true, false or null, not 'no'"),
    ({"rescale_factor": None}, "rescale_factor must not be null unless do_rescale is false"),
    ({"image_mean": None}, "image_mean and image_std must not be null unless do_normalize is false"),
    ({"image_std": None}, "image_mean and image_std must not be null unless do_normalize is false"),
    ({"image_std": 0.0}, "not finite numbers"),
    ({"image_mean": float("nan")}, "not finite numbers"),
    ({"rescale_factor": 1e300}, "not finite numbers"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_are_exactly_those_of_the_processor(name: str) -> None:
    processor = getattr(transformers, name)(**FAMILIES[name])
    pixel_bytes = PixelBytes(processor)
    for kwargs in OTHERS:
        expected = processor(images=[PICTURE], return_tensors="np", **kwargs)["pixel_values"]
        made = processor(images=[PICTURE], return_tensors="np", **pixel_bytes.kwargs(kwargs))
        pixel_bytes.add_levels(made, kwargs)
        assert made["pixel_values"].dtype == np.uint8 or "pad_size" in kwargs
        assert "pixel_attention_mask" not in made
        tensors = {key: tensor(made[key]) for key in ("pixel_values", LEVELS) if key in made}
        np.testing.assert_array_equal(pixels_of(tensors, "pixel_values", expected.ndim), expected)


@pytest.mark.parametrize(("kwargs", "message"), FAULTS)
def test_arguments_of_steps_that_are_left_out(kwargs: dict[str, Any], message: str) -> None:
    """The processor no longer checks them."""
    processor = transformers.Idefics3ImageProcessorPil(**TILES)
    pixel_bytes = PixelBytes(processor)
    with pytest.raises(ValueError, match=message):
        pixel_bytes.add_levels(processor(images=[PICTURE], return_tensors="np", **pixel_bytes.kwargs(kwargs)), kwargs)


def test_settings_that_pad() -> None:
    """Margins of the processor's own settings are zeros, not the number of byte 0."""
    processor = transformers.SiglipImageProcessorPil(**SIDES, **PADDED)
    pixel_bytes = PixelBytes(processor)
    assert pixel_bytes.kwargs({}) == {}
    assert pixel_bytes.kwargs({"do_pad": False}) == {"do_pad": False, "do_rescale": False, "do_normalize": False}


def test_processors_of_others_make_numbers() -> None:
    class Own(transformers.SiglipImageProcessorPil):
        pass

    pixel_bytes = PixelBytes(Own())
    assert pixel_bytes.kwargs({"size": 3}) == {"size": 3}
    inputs: dict[str, Any] = {}
    pixel_bytes.add_levels(inputs, {})
    assert not inputs


@pytest.mark.parametrize("shape", [(3, 255), (2, 256)])
def test_levels_of_other_pixels_are_refused(shape: tuple[int, int]) -> None:
    tensors = {"pixel_values": tensor(np.zeros((1, 3, 5, 5), np.uint8)), LEVELS: tensor(np.zeros(shape, np.float32))}
    with pytest.raises(ProtocolError, match="levels of shape"):
        pixels_of(tensors, "pixel_values", 4)


def tensor(array: Any) -> MediaTensor:
    return MediaTensor(array.dtype.name, list(array.shape), Buffer(array.tobytes()))
