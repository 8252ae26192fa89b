"""Decodes images of requests and runs the model's processor, in a process that may be killed.

Images come from strangers, and decoders are large programs in C. Here they have a limit of memory, and their parent one
of time. The process lives on from image to image, because importing `transformers` takes seconds.
"""

import io
import resource
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from octavo.frontend.media.pixels import in_rgb
from octavo.frontend.media.wire import LENGTH, Job, Ready, Result, Setup
from octavo.frontend.media.without_videos import leave_out_videos
from octavo.protocol.buffers import Buffer
from octavo.protocol.lifecycle import die_with_parent
from octavo.protocol.media import MediaTensor, digest_of

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Of files that are decoded; of an animation the first frame."""
BYTES_PER_PIXEL = 64
"""Memory that processing takes, at most: several copies in float32."""
SPARE_BYTES = 2**28
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
"""Results of a processor that are not about images."""


class ImageProcessor:
    """The processor of one model."""

    def __init__(self, setup: Setup) -> None:
        """Load it.

        Raises:
            ImportError: Pillow is missing.
            OSError, ValueError: the files of the processor are missing or invalid.
        """
        # perf: with torch, importing transformers takes five times as long and as much memory. Its processors of
        # images that need no torchvision need no torch either.
        sys.modules["torch"] = None  # type: ignore[assignment]
        import PIL.Image
        import transformers

        transformers.logging.set_verbosity_error()
        leave_out_videos()
        PIL.Image.MAX_IMAGE_PIXELS = None  # the limit is checked here
        self._setup = setup
        self._processor: Any = transformers.AutoProcessor.from_pretrained(
            setup.processor_path, trust_remote_code=setup.trusts_remote_code, local_files_only=True
        )
        self.placeholder: str = self._processor.image_token

    def process(self, job: Job) -> Result:
        """Return what the processor makes of an image."""
        image = self._open(job)
        if isinstance(image, Result):
            return image
        inputs = self._processor(
            images=[image],
            text=[self.placeholder],
            add_special_tokens=False,
            return_tensors="np",
            return_text_replacement_offsets=True,
            **{**self._setup.processor_kwargs, **job.processor_kwargs},
        )
        tensors = {
            name: MediaTensor(value.dtype.name, list(value.shape), Buffer(value.tobytes()))
            for name, value in inputs.items()
            if name not in _OF_TEXT
        }
        ((offsets, *_), *_) = inputs["text_replacement_offsets"]
        token_ids = inputs["input_ids"][0].tolist()
        return Result(
            replacement=offsets["replacement"],
            token_ids=token_ids,
            num_rows=token_ids.count(self._setup.image_token_id),
            digest=digest_of(tensors),
            tensors={name: (one.dtype, one.shape, bytes(one.data.data)) for name, one in tensors.items()},
            grid=self._grid(inputs),
        )

    def _grid(self, inputs: Any) -> list[int]:
        """Return the grid of an image's rows; []: the model's positions have one axis."""
        if "image_grid_thw" not in inputs:
            return []
        ((frames, height, width),) = inputs["image_grid_thw"].tolist()
        size = self._processor.image_processor.merge_size
        return [frames, height // size, width // size]

    def _open(self, job: Job) -> "Image.Image | Result":
        """Return the picture in RGB, or why there is none."""
        from PIL import Image, ImageOps

        if job.size is not None:
            return Image.frombytes("RGB", job.size, job.data)
        try:
            image = Image.open(io.BytesIO(job.data), formats=FORMATS)
        except Image.UnidentifiedImageError:
            return Result(f"it is not an image in one of the formats {', '.join(FORMATS)}")
        width, height = image.size
        if width * height > self._setup.max_pixels:
            limit = f"more than {self._setup.max_pixels} pixels (--max-image-pixels)"
            return Result(f"it has {width} x {height} pixels, {limit}")
        return in_rgb(ImageOps.exif_transpose(image))


def _limit_memory(max_pixels: int) -> None:
    """Let the process take no more memory than an image of the largest size needs."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + max_pixels * BYTES_PER_PIXEL + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def read_message(file: BinaryIO) -> bytes:
    """Return the next message; b"": the other side has closed the pipe."""
    head = file.read(LENGTH.size)
    return file.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def write_message(file: BinaryIO, message: msgspec.Struct) -> None:
    """Write a message and its length."""
    data = msgspec.msgpack.encode(message)
    file.write(LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


def main() -> None:
    """Answer messages from standard input until it is closed."""
    warnings.simplefilter("ignore")
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # libraries may print
    setup = msgspec.msgpack.decode(read_message(source), type=Setup)
    die_with_parent(setup.parent)
    try:
        processor = ImageProcessor(setup)
    except Exception as error:  # process boundary: code of transformers reads files of the model
        write_message(target, Ready("", f"{type(error).__name__}: {error}"))
        return
    _limit_memory(setup.max_pixels)
    write_message(target, Ready(processor.placeholder))
    while data := read_message(source):
        try:
            result = processor.process(msgspec.msgpack.decode(data, type=Job))
        except MemoryError:
            result = Result("it takes too much memory")
        except Exception as error:  # process boundary: decoders raise anything for damaged files
            result = Result(f"it cannot be decoded: {type(error).__name__}: {error}"[:300])
        write_message(target, result)


if __name__ == "__main__":
    main()
