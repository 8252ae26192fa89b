"""Decodes images of requests and runs the model's processor, in a process that may be killed.

Images are untrusted, and decoders are large C programs. This process has a memory limit, and the parent enforces a time
limit. The process stays alive between images, because importing `transformers` takes seconds.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.frontend.media.child import Decoder, serve
from octavo.frontend.media.llama4 import ARCHITECTURE as LLAMA4
from octavo.frontend.media.llama4 import Llama4Images
from octavo.frontend.media.phi4 import ARCHITECTURE as PHI4
from octavo.frontend.media.phi4 import Phi4Images
from octavo.frontend.media.pixel_bytes import PixelBytes
from octavo.frontend.media.pixels import open_picture
from octavo.frontend.media.pixtral import allow_pixtral
from octavo.frontend.media.result import result_alone, result_of
from octavo.frontend.media.smolvlm import allow_smolvlm
from octavo.frontend.media.wire import Job, Result, Setup
from octavo.frontend.media.without_torch import leave_out_torch, leave_out_videos

if TYPE_CHECKING:
    from PIL.Image import Image

BYTES_PER_PIXEL = 64
"""Maximum memory per pixel that processing takes: several copies in float32."""
SPARE_BYTES = 2**28
_LINES = ("ColPaliForRetrieval", "ColQwen2ForRetrieval")
"""Models whose processors write the prompt text themselves; positions of their images have one axis."""
_NOT_OF_REQUESTS = {"data_format", "device", "disable_grouping", "input_data_format", "return_tensors"}
"""Arguments of processors that concern their own arrays, and that requests may not set."""


class ImageProcessor:
    """The image processor of one model."""

    def __init__(self, setup: Setup) -> None:
        """Load the processor.

        Raises:
            ImportError: Pillow is missing.
            OSError, ValueError: the processor's files are missing or invalid.
        """
        leave_out_torch()
        import PIL.Image
        import transformers

        transformers.logging.set_verbosity_error()
        leave_out_videos()
        allow_pixtral()
        allow_smolvlm()
        PIL.Image.MAX_IMAGE_PIXELS = None  # the limit is checked here
        self._setup = setup
        kind = transformers.AutoImageProcessor if setup.is_alone else transformers.AutoProcessor
        self._processor: Any = kind.from_pretrained(
            setup.processor_path, trust_remote_code=setup.trusts_remote_code, local_files_only=True
        )
        image_processor = self._processor if setup.is_alone else self._processor.image_processor
        self._pixel_bytes = PixelBytes(image_processor)
        self._known_kwargs = set(image_processor.valid_kwargs.__annotations__) - _NOT_OF_REQUESTS
        if fault := self._kwargs_fault(setup.processor_kwargs):
            raise ValueError(fault)
        self.placeholder, self.placeholder_id = "", -1
        if not setup.is_alone:
            self.placeholder = self._processor.image_token
            self.placeholder_id = self._processor.tokenizer.convert_tokens_to_ids(self.placeholder)

    def process(self, job: Job) -> Result:
        """Decode and process an image."""
        if fault := self._kwargs_fault(job.processor_kwargs):
            return Result(fault)
        image = open_picture(job, self._setup.max_pixels)
        if isinstance(image, Result):
            return image
        further = {**self._setup.processor_kwargs, **job.processor_kwargs}
        inputs = self._inputs(image, self._pixel_bytes.kwargs(further))
        self._pixel_bytes.add_levels(inputs, further)
        if self._setup.is_alone:
            return result_alone(inputs)
        if self._setup.architecture in _LINES:
            return self._line(inputs)
        return result_of(inputs, self._setup.token_id, self._grid(inputs))

    def _inputs(self, image: "Image", kwargs: Mapping[str, Any]) -> Any:
        """Return the processor's output for an image: arrays by name."""
        if self._setup.is_alone:
            return self._processor(images=[image], return_tensors="np", **kwargs)
        if self._setup.architecture in _LINES:
            return self._processor.image_processor(images=[image], return_tensors="np", **kwargs)
        return self._processor(
            images=[image],
            text=[self.placeholder],
            add_special_tokens=False,
            return_tensors="np",
            return_text_replacement_offsets=True,
            **kwargs,
        )

    def _kwargs_fault(self, kwargs: Mapping[str, Any]) -> str:
        """Return an error message that names the unknown arguments. Empty if there are none."""
        if not (unknown := kwargs.keys() - self._known_kwargs):
            return ""
        return (
            f"mm_processor_kwargs has {', '.join(sorted(unknown))}, and the model's processor of images knows "
            f"{', '.join(sorted(self._known_kwargs))}"
        )

    def _line(self, inputs: Any) -> Result:
        """Return the result of an image whose rows have one-dimensional positions, whatever its grid."""
        replacement = self._processor.replace_image_token(inputs, 0)
        token_ids = [self._setup.token_id] * replacement.count(self.placeholder)
        alone = result_alone(inputs)
        return Result("", replacement, token_ids, len(token_ids), alone.digest, alone.tensors)

    def _grid(self, inputs: Any) -> list[int]:
        """Return the grid of an image's rows. `[]` if the model's positions have one axis."""
        if "image_grid_thw" not in inputs:
            return []
        ((frames, height, width),) = inputs["image_grid_thw"].tolist()
        size = self._processor.image_processor.merge_size
        return [frames, height // size, width // size]


def _processor_of(setup: Setup) -> ImageProcessor | Llama4Images | Phi4Images:
    """Return the model's processor, or our replacement if it needs torchvision."""
    if setup.architecture == LLAMA4:
        return Llama4Images(setup)
    return Phi4Images(setup) if setup.architecture == PHI4 else ImageProcessor(setup)


def _load(setup: Setup) -> Decoder:
    processor = _processor_of(setup)
    num_bytes = setup.max_pixels * BYTES_PER_PIXEL + SPARE_BYTES
    return Decoder(processor.process, num_bytes, processor.placeholder, processor.placeholder_id)


if __name__ == "__main__":
    serve(Setup, Job, _load, Result)
