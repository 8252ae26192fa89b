"""Converts the videos of callers to jobs for the decoding processes."""

from collections.abc import Mapping
from typing import Any

from octavo.frontend.media.download import MediaError
from octavo.frontend.media.images import pixels_of
from octavo.frontend.media.parts import MediaSource
from octavo.frontend.media.wire import VideoJob
from octavo.protocol.config.media import ResolvedMedia

MAX_CLIP_FRAMES = 4
"""Limit of an array's pixels, in units of `--max-image-pixels`: the frames are copied to another process."""
_EXPECTED = (
    "expected a URL, the bytes of a file, an array of uint8 with shape (frames, height, width, 3), or a list of "
    "pictures, alone or with a dict of its fps, frames_indices and total_num_frames"
)


def is_one_video(value: Any) -> bool:
    """Return whether a value of `multi_modal_data` is one video, rather than a list of several.

    A list is one video if it consists of pictures (its frames).
    """
    if not isinstance(value, list | tuple):
        return True
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return True
    return bool(value) and all(_is_picture(one) for one in value)


def video_job(value: Any, processor_kwargs: Mapping[str, Any], media: ResolvedMedia) -> VideoJob:
    """Return the job that decodes a video.

    Args:
        value: bytes of a file; an array of uint8, shape (frames, height, width, 3), in RGB; a list of pictures; or, as
            in vLLM, a pair of such frames and a dict with `fps`, `frames_indices` and `total_num_frames`.
        processor_kwargs: processor arguments of the request.
        media: limits.

    Raises:
        MediaError: the value is something else, or too large.
    """
    if isinstance(value, bytes):
        return VideoJob(value, None, 0.0, [], 0, dict(processor_kwargs))
    metadata: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metadata = value
    frames = list(value) if isinstance(value, list | tuple) or len(getattr(value, "shape", ())) == 4 else []
    if not frames:
        raise MediaError(f"it is a {type(value).__name__}; {_EXPECTED}")
    if len(frames) > media.max_video_frames:
        raise MediaError(f"it has {len(frames)} frames, more than {media.max_video_frames} (--max-video-frames)")
    pixels, sizes = [], set()
    for frame in frames:
        data, size = pixels_of(frame, media.max_image_pixels)
        pixels.append(data)
        sizes.add(size)
        if len(sizes) > 1:
            raise MediaError("its frames have different sizes")
        if sum(map(len, pixels)) > 3 * MAX_CLIP_FRAMES * media.max_image_pixels:
            raise MediaError(f"it has more than {MAX_CLIP_FRAMES} times {media.max_image_pixels} pixels")
    ((width, height),) = sizes
    return VideoJob(
        b"".join(pixels), (len(frames), height, width), *_timing(metadata, len(frames)), dict(processor_kwargs)
    )


def _timing(metadata: Mapping[str, Any], num_frames: int) -> tuple[float, list[int], int]:
    """Return the frame rate of the original video (0: unknown), the indices of the given frames, and its number of
    frames.

    Raises:
        MediaError: the values are not consistent numbers.
    """
    fps, total = metadata.get("fps") or 0.0, metadata.get("total_num_frames") or num_frames
    indices = metadata.get("frames_indices")
    places = list(range(num_frames)) if indices is None else [int(one) for one in indices]
    is_in_order = places == sorted(places) and len(places) == num_frames and places[0] >= 0 and places[-1] < total
    if isinstance(fps, bool) or not isinstance(fps, int | float) or fps < 0 or not is_in_order:
        raise MediaError(
            f"fps is {fps!r}, total_num_frames {total!r} and frames_indices {indices!r}; expected a number, and "
            f"{num_frames} places in order, one for each frame"
        )
    return float(fps), places, int(total)


def _is_picture(value: Any) -> bool:
    is_item = isinstance(value, MediaSource | bytes | str | Mapping) or value is None
    return not is_item and (hasattr(value, "getbands") or len(getattr(value, "shape", ())) == 3)
