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


class VideoSetup(msgspec.Struct, array_like=True):
    """The first message to a process that decodes videos; answered by `Ready`."""

    parent: int
    processor_path: str
    trusts_remote_code: bool
    token_id: int
    processor_kwargs: dict[str, Any]
    max_pixels: int
    """Of a frame."""
    max_seconds: float
    max_frames: int
    """That are read of a video."""
    num_frames: int
    """That are read unless a request has another number; -1: all; 0: as the model does."""
    fps: float
    """That are read of a second, at most `num_frames`; 0 or less: `num_frames`."""
    architecture: str
    """See `MediaFacts`."""
    max_rows: int
    """Of a video."""
    max_part_rows: int
    """Of a group of frames that are one patch on the axis of time."""
    tokens_per_second: float
    """Positions on the axis of time in a second; 0: each group of frames takes one."""
    has_timestamps: bool
    """The prompt has the time of each group of frames as text before it."""


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


class VideoJob(msgspec.Struct, array_like=True):
    """One video; answered by `Result`."""

    data: bytes
    """A file, or the pixels of frames of `size`, three bytes each."""
    size: tuple[int, int, int] | None
    """Frames, height and width; None: `data` is a file."""
    fps: float
    """Of the video that the frames are from; 0: it is not known."""
    indices: list[int]
    """Places of the frames in their video."""
    num_total: int
    """Frames of that video."""
    processor_kwargs: dict[str, Any]


class Result(msgspec.Struct, array_like=True):
    """What the processor makes of an item."""

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
    part_rows: list[int] = []
    """Rows of each part that is encoded without a look at the others, such as a window of a sound or a frame of a
    video; parts have equal shares of the first axis of each tensor, and of the frames of the grid. []: it is one."""
    frame_step: float = 1.0
    """See `MediaItem.frame_step`."""
