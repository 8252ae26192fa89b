"""`PixelBytes`: the processor of `transformers` leaves pixels as bytes, and the workers convert them to floats.

Bytes take a quarter of the memory of float32 in caches and messages, and a quarter of the copying time.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.protocol.media import LEVELS

_STEPS = {"do_rescale": ("rescale_factor",), "do_normalize": ("image_mean", "image_std")}
"""The last steps of a processor, which convert bytes to floats, and the settings that each step needs."""
_MASK = "pixel_attention_mask"


class PixelBytes:
    """Runs an image processor without its last steps.

    Args:
        image_processor: with its settings. A processor that is not from `transformers` keeps all of its steps.
    """

    def __init__(self, image_processor: Any) -> None:
        self._processor = image_processor
        self._is_known = type(image_processor).__module__.startswith("transformers.")
        # Tiles of one image have one size. The mask of their margins would be all ones, and twice as large as the
        # pixels.
        has_mask = _MASK in getattr(image_processor, "model_input_names", ())
        self._left_out = {**dict.fromkeys(_STEPS, False), **({"do_pad": False} if has_mask else {})}

    def kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with which the processor leaves pixels as bytes, given the arguments of an item.

        Raises:
            ValueError: the switch of a skipped step is not a boolean; the processor itself does not check it any more.
        """
        if not self._makes_bytes(kwargs):
            return dict(kwargs)
        for name in self._left_out:
            if not isinstance(kwargs.get(name), bool | None):
                raise ValueError(f"{name} must be true, false or null, not {kwargs[name]!r}")
        return {**kwargs, **self._left_out}

    def add_levels(self, inputs: Any, kwargs: Mapping[str, Any]) -> None:
        """Add a table, `LEVELS`, of the float that each byte of each channel stands for. Without it, pixels are floats.

        The processor itself converts all 256 bytes, so the table holds exactly the values that it makes of a picture.

        Args:
            inputs: the processor's output, by name.
            kwargs: keyword arguments of the item.

        Raises:
            ValueError: the arguments are not those of the processor, or a value is not finite.
        """
        if not self._is_known:
            return
        levels = self._levels(kwargs)
        if not np.isfinite(levels).all():
            raise ValueError("rescale_factor, image_mean and image_std make pixels that are not finite numbers")
        is_bytes = self._makes_bytes(kwargs)
        if is_bytes:
            inputs[LEVELS] = levels
        # Qwen-VL's bytes are returned as float32, and values without both steps as uint8.
        pixels = np.asarray(inputs["pixel_values"])
        inputs["pixel_values"] = pixels.astype(np.uint8 if is_bytes else np.float32, copy=False)

    def _makes_bytes(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the processor can skip its last steps.

        It pads to `pad_size` after them. Such margins are zeros, which may differ from the value of byte 0.
        """
        does_pad = "do_pad" not in self._left_out and self._setting("do_pad", kwargs)
        return self._is_known and not (does_pad and self._setting("pad_size", kwargs) is not None)

    def _levels(self, kwargs: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """Return the processor's value of each byte of each channel: shape (3, 256)."""
        levels: npt.NDArray[Any] = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))  # an image: channels first
        with np.errstate(all="ignore"):  # values that are not finite are reported by the caller
            for step, names in _STEPS.items():
                if not self._setting(step, kwargs):
                    continue
                settings = [self._setting(name, kwargs) for name in names]
                if None in settings:
                    raise ValueError(f"{' and '.join(names)} must not be null unless {step} is false")
                apply = self._processor.rescale if step == "do_rescale" else self._processor.normalize
                levels = apply(levels, *settings)
            return levels[:, 0].astype(np.float32)

    def _setting(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        """Return an argument of the item, or the processor's own setting."""
        return kwargs.get(name, getattr(self._processor, name, None))
