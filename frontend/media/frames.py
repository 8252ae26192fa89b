"""Reads frames of video files as PIL images, in a process that may be killed; also decides which frames are read.

FFmpeg can open further files that a playlist or container names. Here it may read neither such formats nor anything but
the given bytes, and only with the decoders of common videos.
"""

import errno
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,gif,ogg,flv"
"""Names of allowed FFmpeg demuxers: MP4/QuickTime, Matroska/WebM, and others whose files are self-contained."""
DECODERS = (
    *("h264", "hevc", "libdav1d", "vp9", "vp8", "mpeg4", "mpeg2video", "mpeg1video", "theora", "flv", "h263"),
    *("mjpeg", "gif", "png", "ffv1", "rawvideo", "prores", "dnxhd"),
    *("msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "wmv3", "vc1"),
)
"""Names of allowed FFmpeg decoders."""


class VideoError(Exception):
    """Why a video cannot be used. The message is shown to the caller."""


class FewerFramesError(Exception):
    """A file has fewer frames than packets: some packets only serve to decode later frames."""

    def __init__(self, num_frames: int) -> None:
        super().__init__(num_frames)
        self.num_frames = num_frames


@dataclass(frozen=True, slots=True)
class Timing:
    """Which frames of a video are read, and when they are shown."""

    fps: float
    """Frames per second of the complete video."""
    num_frames: int
    """Number of frames of the complete video."""
    indices: Sequence[int]
    """Indices of the frames to read, in order."""
    duration_s: float | None = None
    """Duration of the complete video in seconds. `None` if unknown."""

    @property
    def read_fps(self) -> float:
        """Number of read frames per second of the video."""
        return len(self.indices) / self.num_frames * self.fps


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a video file."""

    max_pixels: int
    """Maximum number of pixels of a frame."""
    max_seconds: float
    max_frames: int
    """Maximum number of frames that are read."""


def choose_frames(num_frames: int, fps: float, most: int, wanted_fps: float) -> Timing:
    """Choose frames at equal distances, including the first and the last one.

    Args:
        num_frames: number of frames of the complete video.
        fps: frame rate of the complete video.
        most: maximum number of frames to read; -1: all.
        wanted_fps: frames to read per second of video, up to `most` in total; 0 or less: as many as `most`.
    """
    count = num_frames if most < 0 else min(most, num_frames)
    if wanted_fps > 0:
        count = max(1, math.floor(min(count, num_frames / fps * wanted_fps)))
    step = (num_frames - 1) / (count - 1) if count > 1 else 0.0
    indices = [min(int(place * step + 1e-9), num_frames - 1) for place in range(count)]
    return Timing(fps, num_frames, indices, num_frames / fps)


class ClipFile:
    """A video file.

    Args:
        data: contents of the file.
        limits: that the file must respect.

    Raises:
        VideoError: the file is not a video, or exceeds a limit.
    """

    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data, self._limits = data, limits
        with closing(self._open()) as container:
            stream = self._stream_of(container)
            self.fps = float(stream.average_rate or stream.guessed_rate or 0)
            if not 0 < self.fps < math.inf:
                raise VideoError("it does not tell how many frames it has in a second")
            self.width, self.height = stream.codec_context.width, stream.codec_context.height
            self._check_size(self.width, self.height)
            self.num_frames = 0
            with _errors_as("it is damaged"):
                for packet in container.demux(stream):  # headers may be wrong
                    self.num_frames += packet.size > 0 and not packet.is_discard
                    if self.num_frames / self.fps > limits.max_seconds:
                        raise VideoError(f"it is longer than {limits.max_seconds:g} seconds (--max-video-seconds)")
        if not self.num_frames:
            raise VideoError("it has no frames")

    def check(self, timing: Timing) -> None:
        """Check the number of frames to read.

        Raises:
            VideoError: there are too many.
        """
        if (count := len(timing.indices)) > self._limits.max_frames:
            raise VideoError(
                f"{count} of its frames would be read, and the limit is {self._limits.max_frames} "
                "(--max-video-frames): ask for fewer with num_frames or fps"
            )

    def pictures(self, timing: Timing) -> "Iterator[Image]":
        """Yield the chosen frames in RGB, rotated as the file says.

        Raises:
            FewerFramesError: the file has fewer frames than `timing` says.
            VideoError: a frame is damaged or too large.
        """
        wanted, num_decoded = list(timing.indices), 0
        with closing(self._open()) as container, _errors_as("a frame is damaged, or far too large"):
            for frame in container.decode(self._stream_of(container)):
                if num_decoded == wanted[0]:
                    self._check_size(frame.width, frame.height)
                    picture: Image = frame.to_image(threads=1)
                    yield picture.rotate(frame.rotation, expand=True) if frame.rotation % 360 else picture
                    wanted.pop(0)
                num_decoded += 1
                if not wanted:
                    return
        if not num_decoded:
            raise VideoError("none of its frames can be decoded")
        raise FewerFramesError(num_decoded)

    def _open(self) -> Any:
        import av

        options = {
            "format_whitelist": FORMATS,
            "protocol_whitelist": "none",
            "codec_whitelist": ",".join(DECODERS),
            **self._codec_options(),  # FFmpeg decodes frames already to detect their format
        }
        with _errors_as("it is not a video in a format such as MP4, WebM, AVI, MPEG or GIF"):
            try:
                return av.open(io.BytesIO(self._data), options=options, metadata_errors="ignore")
            except av.error.FFmpegError:
                raise
            except ValueError as error:
                raise VideoError(f"its header is damaged: {error}") from None

    def _stream_of(self, container: Any) -> Any:
        """Return the first video stream that is not cover art.

        Raises:
            VideoError: there is none, or its decoder is not allowed.
        """
        from av.stream import Disposition

        found = [one for one in container.streams.video if not one.disposition & Disposition.attached_pic]
        if not found:
            raise VideoError("it has no pictures")
        context = found[0].codec_context
        if context is None or context.codec.name not in DECODERS:
            name = "an unknown codec" if context is None else context.codec.name
            raise VideoError(f"its pictures are in {name}; use H.264, H.265, AV1, VP9, VP8 or MPEG-4")
        context.thread_count = 1  # the engine computes on the other cores
        context.options = self._codec_options()  # the size of frames may grow within a file
        return found[0]

    def _codec_options(self) -> dict[str, str]:
        # Check before memory for a frame is allocated. Decoders pad frames, and allocate small ones for their own use.
        return {"max_pixels": str(2 * max(self._limits.max_pixels, 2**15))}

    def _check_size(self, width: int, height: int) -> None:
        most = self._limits.max_pixels
        if width < 1 or height < 1:
            raise VideoError(f"its frames have no size, or far more than {most} pixels (--max-image-pixels)")
        if width * height > most:
            raise VideoError(f"it has {width} x {height} pixels; up to {most} are read (--max-image-pixels)")


@contextmanager
def _errors_as(message: str) -> Iterator[None]:
    """Convert FFmpeg's errors to a `VideoError` with the given message; out-of-memory errors become `MemoryError`."""
    import av

    try:
        yield
    except av.error.FFmpegError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from None
        raise VideoError(message) from None
