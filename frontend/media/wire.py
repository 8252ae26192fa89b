"""Messages between a frontend and the processes that decode its media, over pipes."""

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
"""Prefix of each message: its length in bytes."""


class Setup(msgspec.Struct, array_like=True):
    """The first message to a process that decodes images; the reply is `Ready`."""

    parent: int
    processor_path: str
    trusts_remote_code: bool
    token_id: int
    max_pixels: int
    processor_kwargs: dict[str, Any]
    architecture: str
    """Architecture of the model."""
    is_alone: bool = False
    """Whether an image is a prompt by itself, so that the processor makes no text."""


class VideoSetup(msgspec.Struct, array_like=True):
    """The first message to a process that decodes videos; the reply is `Ready`."""

    parent: int
    processor_path: str
    trusts_remote_code: bool
    token_id: int
    processor_kwargs: dict[str, Any]
    max_pixels: int
    """Maximum number of pixels of a frame."""
    max_seconds: float
    max_frames: int
    """Maximum number of frames read per video."""
    num_frames: int
    """Number of frames to read unless the request sets another number. -1: all; 0: the model's default."""
    fps: float
    """Frames to read per second of video, up to `num_frames` in total. 0 or less: as many as `num_frames`."""
    architecture: str
    """Architecture of the model; see `MediaFacts`."""
    max_rows: int
    """Maximum number of rows of a video."""
    max_part_rows: int
    """Maximum number of rows of a group of frames, which is one patch on the time axis."""
    tokens_per_second: float
    """Positions on the time axis per second. 0: each group of frames takes one position."""
    has_timestamps: bool
    """Whether the time of each group of frames precedes its rows in the prompt, as text."""


class Ready(msgspec.Struct, array_like=True):
    """The process has loaded its processor, or says why it could not."""

    placeholder: str
    """Text of the token that stands for an item in a prompt."""
    fault: str = ""
    placeholder_id: int = -1
    """Id of that token. -1: no token stands for an item."""


class Job(msgspec.Struct, array_like=True):
    """One image; the reply is a `Result`."""

    data: bytes
    """A file, or the RGB bytes of a picture of `size`."""
    size: tuple[int, int] | None
    """Width and height in pixels. `None` if `data` is a file."""
    processor_kwargs: dict[str, Any]


class VideoJob(msgspec.Struct, array_like=True):
    """One video; the reply is a `Result`."""

    data: bytes
    """A file, or the RGB bytes of frames of `size`."""
    size: tuple[int, int, int] | None
    """Number of frames, height and width in pixels. `None` if `data` is a file."""
    fps: float
    """Frame rate of the video that the frames are from. 0: unknown."""
    indices: list[int]
    """Indices of the frames in their video."""
    num_total: int
    """Number of frames of that video."""
    processor_kwargs: dict[str, Any]


class Result(msgspec.Struct, array_like=True):
    """The processor's result for one item."""

    fault: str = ""
    """Why the item cannot be used, for the caller. Empty if it can."""
    replacement: str = ""
    """Text that replaces the placeholder."""
    token_ids: list[int] = []
    """Token ids of that text."""
    num_rows: int = 0
    """Number of row placeholders among them."""
    digest: bytes = b""
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    """Tensors by name: dtype, shape and bytes."""
    grid: list[int] = []
    """See `MediaItem.grid`."""
    duration_s: float = 0.0
    """Duration of an audio clip in seconds."""
    part_rows: list[int] = []
    """Number of rows of each part that is encoded independently, such as a window of an audio clip or a frame of a
    video. Parts have equal shares of the first axis of each tensor, and of the frames of the grid. `[]`: the item
    is one part."""
    frame_step: float = 1.0
    """See `MediaItem.frame_step`."""
