"""Videos of Qwen-VL, where a patch covers several consecutive frames."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.frontend.media.frames import Timing, VideoError
from octavo.frontend.media.result import result_of
from octavo.frontend.media.videos import VideoProcessor, read_settings
from octavo.frontend.media.wire import Result, VideoSetup
from octavo.protocol.media import MAX_POSITIONS

if TYPE_CHECKING:
    from PIL.Image import Image

KNOWN_KWARGS = ("fps", "max_pixels", "min_pixels", "num_frames", "size")
"""Arguments that servers and requests may set."""
_MAX_ASPECT = 200


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """How frames are resized and divided into patches, from the model's files."""

    patch_size: int
    frames_per_patch: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    """Maximum number of pixels of a frame, or of all frames together if `is_whole` (Qwen3-VL)."""
    is_whole: bool

    @property
    def side(self) -> int:
        """Side in pixels of a square of patches; each square becomes one row of the prompt."""
        return self.patch_size * self.merge_size

    @property
    def bytes_per_row(self) -> int:
        """Bytes of the float32 pixels of such a square."""
        return self.side**2 * 3 * self.frames_per_patch * 4

    @classmethod
    def read(cls, settings: Mapping[str, Any], *, is_whole: bool) -> "ClipSettings":
        """Read the settings of the model's video processor. `is_whole`: the model is Qwen3-VL.

        Raises:
            ValueError: a setting is not supported.
        """
        if settings.get("cap_pixels_per_frame"):
            raise ValueError("cap_pixels_per_frame of the processor of videos is not supported")
        patch_size, merge_size = settings.get("patch_size", 16 if is_whole else 14), settings.get("merge_size", 2)
        square = (patch_size * merge_size) ** 2
        default = {"shortest_edge": 128 * square, "longest_edge": 768 * square}
        own = cls(patch_size, settings.get("temporal_patch_size", 2), merge_size, 0, 0, is_whole)
        return own.with_kwargs({"size": default}).with_kwargs({key: settings.get(key) for key in KNOWN_KWARGS})

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> "ClipSettings":
        """Return these settings with the arguments of a server or a request applied.

        Raises:
            ValueError: an argument is not a valid number of pixels.
        """
        size = kwargs.get("size") or {}
        if not isinstance(size, Mapping):
            raise ValueError(f"size is {size!r}; expected shortest_edge and longest_edge")
        least = kwargs.get("min_pixels") or size.get("shortest_edge") or self.min_pixels
        most = kwargs.get("max_pixels") or size.get("longest_edge") or self.max_pixels
        if type(least) is not int or type(most) is not int or not 0 < least <= most:
            raise ValueError(f"videos have from {least!r} to {most!r} pixels; expected two numbers in order")
        sizes = self.patch_size, self.frames_per_patch, self.merge_size
        return ClipSettings(*sizes, least, most, self.is_whole)

    def size_of(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which frames are resized: multiples of `side`.

        Raises:
            VideoError: the aspect ratio is too extreme.
        """
        side = self.side
        if self.is_whole and min(height, width) < side:
            scale = side / min(height, width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > _MAX_ASPECT * min(height, width):
            raise VideoError(f"one side of its frames is more than {_MAX_ASPECT} times as long as the other")
        rows, columns = round(height / side), round(width / side)
        counted, rounded = 1, 1
        if self.is_whole:
            step = self.frames_per_patch
            counted, rounded = num_frames, max(step, round(num_frames / step) * step)
        pixels = rounded * rows * columns * side * side
        if pixels > self.max_pixels:
            shrink = math.sqrt(counted * height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(one / shrink / side)) for one in (height, width))
        elif pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (counted * height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * side, columns * side


class QwenVideos(VideoProcessor):
    """The video processor of one model; see `VideoProcessor`."""

    known_kwargs = KNOWN_KWARGS

    def __init__(self, setup: VideoSetup) -> None:
        super().__init__(setup)
        import transformers
        from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        settings = read_settings(Path(setup.processor_path))
        whole = {"image_mean": IMAGENET_STANDARD_MEAN, "image_std": IMAGENET_STANDARD_STD}
        kept = ("do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std")
        self._settings = ClipSettings.read(settings, is_whole=setup.has_timestamps).with_kwargs(setup.processor_kwargs)
        self._frames: Any = Qwen2VLImageProcessorPil(
            do_resize=False,
            patch_size=self._settings.patch_size,
            merge_size=self._settings.merge_size,
            temporal_patch_size=1,
            **{**(whole if setup.has_timestamps else {}), **{key: settings[key] for key in kept if key in settings}},
        )
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            setup.processor_path, trust_remote_code=setup.trusts_remote_code, local_files_only=True
        )
        self.placeholder_id = setup.token_id
        self.placeholder: str = self._tokenizer.convert_ids_to_tokens(setup.token_id)

    @property
    def bytes_per_row(self) -> int:
        """See `VideoProcessor`."""
        return self._settings.bytes_per_row

    def rows_of_frames(self, num_frames: int, height: int, width: int, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """See `VideoProcessor`."""
        settings = self._settings.with_kwargs(kwargs)
        rows, columns = settings.size_of(num_frames, height, width)
        each = rows * columns // settings.side**2
        return each, each * -(-num_frames // settings.frames_per_patch)

    def result(self, timing: Timing, pictures: "Iterable[Image]", kwargs: Mapping[str, Any]) -> Result:
        """See `VideoProcessor`."""
        settings = self._settings.with_kwargs(kwargs)
        size: tuple[int, int] | None = None
        patches, group = [], list[Any]()
        for picture in _padded(pictures, settings.frames_per_patch):
            if size is None:
                frame_size = len(timing.indices), picture.height, picture.width
                self.check_rows(*frame_size, kwargs)  # the header of the file may have been wrong
                size = settings.size_of(*frame_size)
            group.append(self._patches(picture, size))
            if len(group) == settings.frames_per_patch:
                patches.append(np.stack(group, axis=2).reshape(len(group[0]), -1))
                group = []
        assert size is not None, "a video has frames"
        rows, columns = (one // settings.patch_size for one in size)
        grid = [len(patches), rows // settings.merge_size, columns // settings.merge_size]
        text = self._text(settings, timing, grid)
        inputs = {
            # The model reads video patches under the names of image patches.
            "pixel_values": np.concatenate(patches).astype(np.float32, copy=False),
            "image_grid_thw": np.array([[1, rows, columns]] * len(patches), dtype=np.int64),
            "input_ids": np.array([self._tokenizer.encode(text, add_special_tokens=False)]),
            "text_replacement_offsets": [[{"replacement": text}]],
        }
        frame_step, part_rows = self._frame_step(settings, timing), [grid[1] * grid[2]] * grid[0]
        return result_of(inputs, self.placeholder_id, grid, frame_step=frame_step, part_rows=part_rows)

    def _patches(self, picture: "Image", size: tuple[int, int]) -> Any:
        """Return the patches of a frame: shape (patches, channels, pixels)."""
        from PIL import Image

        if (picture.height, picture.width) != size:
            picture = picture.resize(size[::-1], Image.Resampling.BICUBIC)
        rows = self._frames(images=[picture], return_tensors="np")["pixel_values"]
        return rows.reshape(len(rows), 3, -1)

    def _text(self, settings: ClipSettings, timing: Timing, grid: list[int]) -> str:
        """Return the prompt text of a video. In Qwen3-VL, the time of each group of frames precedes its rows."""
        if not self.setup.has_timestamps:
            return self.placeholder * math.prod(grid)
        indices, step = list(timing.indices), settings.frames_per_patch
        indices += indices[-1:] * (-len(indices) % step)
        frame = f"<|vision_start|>{self.placeholder * (grid[1] * grid[2])}<|vision_end|>"
        times = [
            (indices[place] / timing.fps + indices[place + step - 1] / timing.fps) / 2
            for place in range(0, len(indices), step)
        ]
        return "".join([f"<{time:.1f} seconds>{frame}" for time in times])

    def _frame_step(self, settings: ClipSettings, timing: Timing) -> float:
        """Return the distance, in positions, between consecutive groups of frames."""
        if not self.setup.tokens_per_second:
            return 1.0
        step = np.float32(self.setup.tokens_per_second) * np.float32(settings.frames_per_patch / timing.read_fps)
        if -(-len(timing.indices) // settings.frames_per_patch) * step > MAX_POSITIONS:
            raise VideoError(f"it has {timing.read_fps:g} frames in a second, too few for the model's positions")
        return float(step)


def _padded(pictures: "Iterable[Image]", multiple: int) -> "Iterator[Image]":
    """Yield the pictures, repeating the last one until their number is a multiple of `multiple`."""
    last, count = None, 0
    for last in pictures:
        count += 1
        yield last
    if last is not None:
        yield from itertools.repeat(last, -count % multiple)
