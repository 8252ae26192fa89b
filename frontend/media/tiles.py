"""Image processors that cut pictures into tiles; they replace processors of `transformers` that need torchvision."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from octavo.frontend.media.pixels import open_picture
from octavo.frontend.media.result import result_of
from octavo.frontend.media.wire import Job, Result, Setup
from octavo.frontend.media.without_torch import leave_out_torch

if TYPE_CHECKING:
    from PIL import Image

Floats = npt.NDArray[np.float32]

MOST_TILES = 64
"""Maximum number of tiles that a request may set: the time to find their grid grows with the square of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileProcessor:
    """Cuts pictures into tiles with the settings of one model.

    Args:
        side: side of a tile in pixels.
        max_tiles: maximum number of tiles of a picture, not counting the tile of the complete picture.
        mean: mean of each channel, for values from 0 to 1.
        deviation: standard deviation of each channel.
        scale: factor from bytes to values from 0 to 1.
    """

    default_side: ClassVar[int]
    default_tiles: ClassVar[int]
    tiles_key: ClassVar[str]
    """Name of the setting and request argument that is `max_tiles`."""
    further_kwargs: ClassVar[tuple[str, ...]] = ()
    """Further arguments that requests may set."""
    needed_steps: ClassVar[tuple[str, ...]]
    """Settings that must be true."""
    resample: ClassVar[int]
    """Code of the resize filter in processor files."""

    side: int
    max_tiles: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    scale: float

    @classmethod
    def own_settings(cls, settings: Mapping[str, Any], side: int) -> dict[str, Any]:
        """Return further constructor arguments of the subclass.

        Raises:
            ValueError: a setting is not supported.
        """
        return {}

    def own_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor arguments that `further_kwargs` change.

        Raises:
            ValueError: a value is invalid.
        """
        return {}

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Read the settings of the model's image processor.

        Raises:
            ValueError: a setting is not supported.
        """
        for key in cls.needed_steps:
            if not settings.get(key, True):
                raise ValueError(f"preprocessor_config.json: {key} is false; expected true")
        if settings.get("resample", cls.resample) != cls.resample:
            raise ValueError(f"preprocessor_config.json: resample is {settings['resample']}; expected {cls.resample}")
        size = settings.get("size", {"height": cls.default_side, "width": cls.default_side})
        side = size.get("height")
        if side != size.get("width") or type(side) is not int or side < 1:
            raise ValueError(f"preprocessor_config.json: size is {size}; expected squares")
        return cls(
            side=side,
            max_tiles=settings.get(cls.tiles_key, cls.default_tiles),
            mean=tuple(settings.get("image_mean", (0.5, 0.5, 0.5))),
            deviation=tuple(settings.get("image_std", (0.5, 0.5, 0.5))),
            scale=settings.get("rescale_factor", 1 / 255),
            **cls.own_settings(settings, side),
        )

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> Self:
        """Return this processor with the arguments of a server or a request applied.

        Raises:
            ValueError: an argument is unknown or has an invalid value.
        """
        known = (self.tiles_key, *self.further_kwargs)
        if unknown := kwargs.keys() - set(known):
            raise ValueError(
                f"mm_processor_kwargs has {', '.join(sorted(unknown))}, and the model's processor knows "
                f"{', '.join(known)}"
            )
        most = kwargs.get(self.tiles_key, self.max_tiles)
        if type(most) is not int or not 1 <= most <= MOST_TILES:
            raise ValueError(f"{self.tiles_key} is {most!r}; expected a number of tiles from 1 to {MOST_TILES}")
        return replace(self, max_tiles=most, **self.own_kwargs(kwargs))


class TileImages(ABC):
    """Replaces the processor of one model; see `octavo.frontend.media.process.ImageProcessor`."""

    placeholder: str
    placeholder_id: int

    def __init__(self, setup: Setup, kind: type[TileProcessor]) -> None:
        """Load the processor.

        Args:
            setup: settings of the process.
            kind: the model's `TileProcessor`.

        Raises:
            ImportError: Pillow is missing.
            OSError, ValueError: the files of the processor or the tokenizer are missing, invalid or not supported.
        """
        leave_out_torch()
        import PIL.Image
        import transformers
        from transformers.image_processing_base import ImageProcessingMixin

        transformers.logging.set_verbosity_error()
        PIL.Image.MAX_IMAGE_PIXELS = None  # the limit is checked here
        settings, _ = ImageProcessingMixin.get_image_processor_dict(setup.processor_path, local_files_only=True)
        self.setup = setup
        self.tiles = kind.read(settings).with_kwargs(setup.processor_kwargs)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            setup.processor_path, trust_remote_code=setup.trusts_remote_code, local_files_only=True
        )

    @abstractmethod
    def inputs(self, picture: "Image.Image", tiles: Any) -> dict[str, Any]:
        """Return what a processor of `transformers` would return: tensors, token ids, and the text of the placeholders.

        Args:
            picture: in RGB.
            tiles: the `TileProcessor` of the model, with the arguments of the request.

        Raises:
            ValueError: the picture cannot be used; the message is shown to the caller.
        """

    def process(self, job: Job) -> Result:
        """Decode an image and return the result of its tiles."""
        image = open_picture(job, self.setup.max_pixels)
        if isinstance(image, Result):
            return image
        try:
            inputs = self.inputs(image, self.tiles.with_kwargs(job.processor_kwargs))
        except ValueError as error:
            return Result(str(error))
        return result_of(inputs, self.setup.token_id)
