"""`PixelBytes`: a processor of `transformers` makes pixels as bytes, and workers the numbers that these stand for.

Bytes take a quarter of the memory of the numbers, in caches and messages, and the time of copying it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.protocol.media import LEVELS

_STEPS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""Settings of the last steps of a processor, which make numbers of bytes."""
_MASK = "pixel_attention_mask"


class PixelBytes:
    """What a processor of images does without its last steps.

    Args:
        image_processor: with its settings. One that is not of `transformers` makes numbers, as it likes.
    """

    def __init__(self, image_processor: Any) -> None:
        self._processor = image_processor
        self._is_known = type(image_processor).__module__.startswith("transformers.")
        # Tiles of one image have one size. The mask of their margins would be all ones, twice as large as the numbers.
        has_mask = _MASK in getattr(image_processor, "model_input_names", ())
        self._left_out = {"do_rescale": False, "do_normalize": False, **({"do_pad": False} if has_mask else {})}

    def kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with which the processor makes bytes, given those of an item."""
        return {**kwargs, **self._left_out} if self._is_known else dict(kwargs)

    def add_levels(self, inputs: Any, kwargs: Mapping[str, Any]) -> None:
        """Add the numbers that each byte of each channel stands for, as `LEVELS`.

        The processor itself makes them of all bytes, so they are exactly what it makes of a picture.

        Args:
            inputs: what the processor has made, by name.
            kwargs: of the item.

        Raises:
            ValueError: the arguments are not those of the processor.
        """
        if not self._is_known:
            return
        chosen = {name: kwargs.get(name, getattr(self._processor, name)) for name in _STEPS}
        levels: npt.NDArray[Any] = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))  # an image: channels first
        if chosen["do_rescale"]:
            levels = self._processor.rescale(levels, chosen["rescale_factor"])
        if chosen["do_normalize"]:
            levels = self._processor.normalize(levels, chosen["image_mean"], chosen["image_std"])
        inputs[LEVELS] = levels[:, 0].astype(np.float32)
        inputs["pixel_values"] = np.asarray(inputs["pixel_values"]).astype(np.uint8, copy=False)  # Qwen-VL: float32
