"""Messages between a frontend and the processes that decode its media, over pipes."""

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
"""Before each message: its number of bytes."""


class Setup(msgspec.Struct, array_like=True):
    """The first message to a process that decodes images; answered by `Ready`."""

    parent: int
    processor_path: str
    trusts_remote_code: bool
    token_id: int
    max_pixels: int
    processor_kwargs: dict[str, Any]
    architecture: str
    """Of the model."""
    is_alone: bool = False
    """An image is a prompt by itself: its processor makes no text."""


class Ready(msgspec.Struct, array_like=True):
    """The process has its processor, or says why not."""

    placeholder: str
    """The text of the token that stands for an item in a prompt."""
    fault: str = ""
    placeholder_id: int = -1
    """That token; -1: nothing stands for an item."""


class Job(msgspec.Struct, array_like=True):
    """One image; answered by `Result`."""

    data: bytes
    """A file, or the pixels of a picture of `size`, three bytes each."""
    size: tuple[int, int] | None
    """Width and height; None: `data` is a file."""
    processor_kwargs: dict[str, Any]


class Result(msgspec.Struct, array_like=True):
    """What the processor makes of an image or a sound."""

    fault: str = ""
    """Why it cannot be used, for the caller; "": it can."""
    replacement: str = ""
    """The text that takes the place of the placeholder."""
    token_ids: list[int] = []
    """The tokens of that text."""
    num_rows: int = 0
    """Placeholders among them."""
    digest: bytes = b""
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    """By name: type, shape and bytes."""
    grid: list[int] = []
    """See `MediaItem.grid`."""
    duration_s: float = 0.0
    """Of a sound."""
    num_items: int = 1
    """Parts that are encoded without a look at each other, such as windows of a sound: each has as many rows, and the
    same share of the first axis of each tensor."""
