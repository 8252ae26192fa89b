"""Converts PIL images to the form that processors take."""

import io
from typing import TYPE_CHECKING

from octavo.frontend.media.wire import Job, Result

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""File formats that are decoded. Only the first frame of an animation is read."""


def open_picture(job: Job, max_pixels: int) -> "Image | Result":
    """Return the picture of a job in RGB, or a result with the reason why it cannot be decoded."""
    import PIL.Image
    import PIL.ImageOps

    if job.size is not None:
        return PIL.Image.frombytes("RGB", job.size, job.data)
    try:
        image = PIL.Image.open(io.BytesIO(job.data), formats=FORMATS)
    except PIL.Image.UnidentifiedImageError:
        return Result(f"it is not an image in one of the formats {', '.join(FORMATS)}")
    width, height = image.size
    if width * height > max_pixels:
        return Result(f"it has {width} x {height} pixels, more than {max_pixels} pixels (--max-image-pixels)")
    return in_rgb(PIL.ImageOps.exif_transpose(image))


def in_rgb(image: "Image") -> "Image":
    """Return a picture in RGB; transparent pixels become white."""
    from PIL import Image

    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    colored = image.convert("RGBA")
    white = Image.new("RGBA", colored.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, colored).convert("RGB")
