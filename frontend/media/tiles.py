"""Processors that cut pictures into tiles, in place of those of `transformers` that need torchvision."""

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
"""That a request may ask for: the search for their arrangement takes the square of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileProcessor:
    """Cuts pictures into tiles, by the settings of one model.

    Args:
        side: pixels of a tile on each side.
        max_tiles: of a picture; that of the whole picture does not count.
        mean: of each channel, for numbers from 0 to 1.
        deviation: of each channel.
        scale: from bytes to such numbers.
    """

    default_side: ClassVar[int]
    default_tiles: ClassVar[int]
    tiles_key: ClassVar[str]
    """The setting and the argument that is `max_tiles`."""
    further_kwargs: ClassVar[tuple[str, ...]] = ()
    """What requests may change besides."""
    needed_steps: ClassVar[tuple[str, ...]]
    """Settings that must be true."""
    resample: ClassVar[int]
    """How pictures are resized, as files name it."""

    side: int
    max_tiles: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    scale: float

    @classmethod
    def own_settings(cls, settings: Mapping[str, Any], side: int) -> dict[str, Any]:
        """Return the further arguments of the class.

        Raises:
            ValueError: one is not supported.
        """
        return {}

    def own_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `further_kwargs` change.

        Raises:
            ValueError: one has a value that is not possible.
        """
        return {}

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Read the settings of the model's image processor.

        Raises:
            ValueError: one is not supported.
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
        """Return this processor with arguments of a server or a request.

        Raises:
            ValueError: one is unknown, or has a value that is not possible.
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
    """Stands for the processor of one model: see `octavo.frontend.media.process.ImageProcessor`."""

    placeholder: str
    placeholder_id: int

    def __init__(self, setup: Setup, kind: type[TileProcessor]) -> None:
        """Load it.

        Args:
            setup: of the process.
            kind: of the model.

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
        """Return what a processor of `transformers` would: tensors, tokens of the placeholders and their text.

        Args:
            picture: in RGB.
            tiles: the `TileProcessor` of the model, with the arguments of the request.

        Raises:
            ValueError: the picture cannot be used; the caller reads why.
        """

    def process(self, job: Job) -> Result:
        """Return the tiles of an image."""
        image = open_picture(job, self.setup.max_pixels)
        if isinstance(image, Result):
            return image
        try:
            inputs = self.inputs(image, self.tiles.with_kwargs(job.processor_kwargs))
        except ValueError as error:
            return Result(str(error))
        return result_of(inputs, self.setup.token_id)
