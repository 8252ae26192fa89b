"""Pictures of Pillow in the form that processors take."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def in_rgb(image: "Image") -> "Image":
    """Return a picture in RGB; what is transparent becomes white."""
    from PIL import Image

    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    colored = image.convert("RGBA")
    white = Image.new("RGBA", colored.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, colored).convert("RGB")
