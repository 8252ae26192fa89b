"""Converts the images of callers to jobs for the decoding processes."""

from collections.abc import Mapping
from typing import Any

from octavo.frontend.media.download import MediaError
from octavo.frontend.media.pixels import in_rgb
from octavo.frontend.media.wire import Job
from octavo.protocol.config.media import ResolvedMedia


def image_job(value: Any, processor_kwargs: Mapping[str, Any], media: ResolvedMedia) -> Job:
    """Return the job that decodes an image.

    Args:
        value: bytes of a file, a PIL image, or an array of uint8, shape (height, width, 3), in RGB.
        processor_kwargs: processor arguments of the request.
        media: limits.

    Raises:
        MediaError: the value is something else, or too large.
    """
    data, size = (value, None) if isinstance(value, bytes) else pixels_of(value, media.max_image_pixels)
    return Job(data, size, dict(processor_kwargs))


def pixels_of(value: Any, max_pixels: int) -> tuple[bytes, tuple[int, int]]:
    """Return the RGB bytes and the size (width, height) of a PIL image or an array of shape (height, width, 3).

    Raises:
        MediaError: the value is something else, or too large.
    """
    if hasattr(value, "convert") and hasattr(value, "getbands"):
        width, height = value.size
        if width * height > max_pixels:
            raise MediaError(f"it has {width} x {height} pixels, more than {max_pixels} (--max-image-pixels)")
        return in_rgb(value).tobytes(), (width, height)
    shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))
    dtype = str(getattr(value, "dtype", ""))
    if len(shape) != 3 or shape[2] != 3 or dtype != "uint8":
        raise MediaError(
            f"it is a {type(value).__name__}; expected a URL, the bytes of a file, a PIL.Image or an array of uint8 "
            "with shape (height, width, 3)"
        )
    if shape[0] * shape[1] > max_pixels:
        raise MediaError(f"it has {shape[1]} x {shape[0]} pixels, more than {max_pixels} (--max-image-pixels)")
    return value.tobytes(), (shape[1], shape[0])
