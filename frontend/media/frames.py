"""Frames of video files, in a process that may be killed: which of them are read, and as pictures of Pillow.

FFmpeg can open further files that a playlist or a container names. Here it may read neither these formats nor anything
but the bytes it was given.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,gif,ogg,flv"
"""Names of FFmpeg's demuxers: MP4 and QuickTime, Matroska and WebM, and others that hold all of their data."""
_OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}


class ClipError(Exception):
    """Why a video cannot be used; the message goes to the caller."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Which frames of a video are read, and when they are shown."""

    fps: float
    """Frames of the whole video in a second."""
    num_frames: int
    """Of the whole video."""
    indices: Sequence[int]
    """Those that are read, in order."""

    @property
    def read_fps(self) -> float:
        """Frames that are read in a second."""
        return len(self.indices) / self.num_frames * self.fps


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a file."""

    max_pixels: int
    """Of a frame."""
    max_seconds: float
    max_frames: int
    """That are read."""


def choose_frames(num_frames: int, fps: float, most: int, wanted_fps: float) -> Timing:
    """Return frames at equal distances, the first and the last among them.

    Args:
        num_frames: of the whole video.
        fps: of the whole video.
        most: frames that are read; -1: all.
        wanted_fps: frames that are read in a second, at most `most`; 0 or less: as many as `most`.
    """
    count = num_frames if most < 0 else min(most, num_frames)
    if wanted_fps > 0:
        count = min(count, max(1, math.floor(num_frames / fps * wanted_fps)))
    step = (num_frames - 1) / (count - 1) if count > 1 else 0.0
    return Timing(fps, num_frames, [min(int(place * step + 1e-9), num_frames - 1) for place in range(count)])


class ClipFile:
    """A video file.

    Args:
        data: of the file.
        limits: of it.

    Raises:
        ClipError: it is no video, or exceeds a limit.
    """

    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data, self._limits = data, limits
        with closing(self._open()) as container:
            stream = _stream_of(container)
            self.fps = float(stream.average_rate or stream.guessed_rate or 0)
            if not 0 < self.fps < math.inf:
                raise ClipError("it does not tell how many frames it has in a second")
            self.width, self.height = stream.codec_context.width, stream.codec_context.height
            self._check_size(self.width, self.height)
            self.num_frames = 0
            for packet in container.demux(stream):  # headers may not tell the truth
                self.num_frames += packet.size > 0
                if self.num_frames / self.fps > limits.max_seconds:
                    raise ClipError(f"it is longer than {limits.max_seconds:g} seconds (--max-video-seconds)")
        if not self.num_frames:
            raise ClipError("it has no frames")

    def choose(self, most: int, wanted_fps: float) -> Timing:
        """Return which frames are read: see `choose_frames`.

        Raises:
            ClipError: they are too many.
        """
        timing = choose_frames(self.num_frames, self.fps, most, wanted_fps)
        if (count := len(timing.indices)) > self._limits.max_frames:
            raise ClipError(
                f"{count} of its frames would be read, and the limit is {self._limits.max_frames} "
                "(--max-video-frames): ask for fewer with num_frames or fps"
            )
        return timing

    def pictures(self, timing: Timing) -> "Iterator[Image]":
        """Yield the chosen frames in RGB, turned as they are shown.

        Raises:
            ClipError: the file has fewer frames than packets, or a frame is too large.
        """
        wanted, num_decoded = list(timing.indices), 0
        with closing(self._open()) as container:
            for frame in container.decode(_stream_of(container)):
                if wanted and num_decoded == wanted[0]:
                    self._check_size(frame.width, frame.height)
                    picture: Image = frame.to_image()
                    yield picture.rotate(frame.rotation, expand=True) if frame.rotation % 360 else picture
                    wanted.pop(0)
                num_decoded += 1
                if not wanted:
                    return
        raise ClipError(f"it ends after {num_decoded} of {timing.num_frames} frames")

    def _open(self) -> Any:
        import av

        try:
            return av.open(io.BytesIO(self._data), options=_OPTIONS, metadata_errors="ignore")
        except (av.error.FFmpegError, ValueError):
            raise ClipError("it is not a video in a format such as MP4, WebM, AVI, MPEG or GIF") from None

    def _check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1 or width * height > self._limits.max_pixels:
            raise ClipError(
                f"it has {width} x {height} pixels; from 1 to {self._limits.max_pixels} are read (--max-image-pixels)"
            )


def _stream_of(container: Any) -> Any:
    if not container.streams.video:
        raise ClipError("it has no pictures")
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # the engine computes on the other cores
    return stream
