"""Decodes videos of requests in a process that may be killed: the part that the processors of all models share.

The video processors of `transformers` need torch and torchvision. They compute for each frame what the model's image
processor computes, except that frames have sizes of their own, and that their times may be part of the text.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.frontend.media.child import Decoder, serve
from octavo.frontend.media.frames import ClipFile, FewerFramesError, Limits, Timing, VideoError, choose_frames
from octavo.frontend.media.wire import Result, VideoJob, VideoSetup
from octavo.frontend.media.without_torch import leave_out_torch
from octavo.protocol.buffers import MAX_BUFFERS_BYTES
from octavo.protocol.config.media import DEFAULT_VIDEO_FRAMES

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_FPS = 24.0
"""Frame rate assumed for frames whose caller gives none, as in `transformers`."""
BYTES_PER_PIXEL = 32
"""Maximum memory per pixel that decoding a frame takes: reference frames of the codec and some copies."""
SPARE_BYTES = 2**29
_COPIES = 4
"""Maximum number of copies of all pixels of a video."""
_FAMILIES = {
    "LlavaOnevisionForConditionalGeneration": ("picture_videos", "OnevisionVideos"),
    "SmolVLMForConditionalGeneration": ("picture_videos", "SmolVideos"),
}
"""Module and class of the processor by architecture. Other architectures use `QwenVideos`."""


class VideoProcessor(ABC):
    """The video processor of one model; its constructor loads it.

    Args:
        setup: settings of the process.

    Raises:
        ImportError: PyAV or Pillow is missing.
        OSError, ValueError: the processor's files are missing or invalid, or one of its arguments is unknown.
    """

    known_kwargs: tuple[str, ...] = ("fps", "num_frames")
    """Arguments that servers and requests may set."""
    placeholder: str
    placeholder_id: int
    num_frames, fps = DEFAULT_VIDEO_FRAMES, 0.0
    """Defaults: maximum number of frames read per file, and frames read per second of video; see `VideoSetup`."""

    def __init__(self, setup: VideoSetup) -> None:
        leave_out_torch()
        import av
        import transformers

        av.logging.set_level(av.logging.PANIC)
        transformers.logging.set_verbosity_error()
        self.setup = setup
        self.check_kwargs(setup.processor_kwargs)

    @property
    @abstractmethod
    def bytes_per_row(self) -> int:
        """Bytes of the pixels that become one row of the prompt."""

    @abstractmethod
    def rows_of_frames(self, num_frames: int, height: int, width: int, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the number of rows of a group of frames that is encoded together, and of the complete video.

        Raises:
            VideoError, ValueError: the frame size or an argument of the request is not possible.
        """

    @abstractmethod
    def result(self, timing: Timing, pictures: "Iterable[Image]", kwargs: Mapping[str, Any]) -> Result:
        """Return the result of decoded frames.

        Raises:
            VideoError, ValueError: see `rows_of_frames`.
        """

    def choose(self, num_frames: int, fps: float, most: int, wanted_fps: float) -> Timing:
        """Choose the frames of a file to read; see `choose_frames`."""
        return choose_frames(num_frames, fps, most, wanted_fps)

    def process(self, job: VideoJob) -> Result:
        """Decode and process a video."""
        try:
            self.check_kwargs(job.processor_kwargs)
            return self._of_file(job) if job.size is None else self._of_frames(job)
        except (VideoError, ValueError) as error:
            return Result(str(error))

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise `ValueError` if an argument of a server or a request is unknown."""
        if unknown := kwargs.keys() - set(self.known_kwargs):
            raise ValueError(
                f"mm_processor_kwargs has {', '.join(sorted(unknown))}, and videos know "
                f"{', '.join(self.known_kwargs)}: put arguments of images into images_kwargs"
            )

    def check_rows(self, num_frames: int, height: int, width: int, kwargs: Mapping[str, Any]) -> None:
        """Check the number of rows of a video.

        Raises:
            VideoError: it is too large.
        """
        each, needed = self.rows_of_frames(num_frames, height, width, kwargs)
        if each > self.setup.max_part_rows:
            raise VideoError(
                f"frames that are encoded together have {each} tokens, and the limit is {self.setup.max_part_rows} "
                f"(--max-num-encoder-tokens and --encoder-cache-tokens limit it): {self._remedy()}"
            )
        most = min(self.setup.max_rows, MAX_BUFFERS_BYTES // self.bytes_per_row)
        if needed > most:
            reason = "--max-model-len" if most == self.setup.max_rows else f"{MAX_BUFFERS_BYTES} bytes of pixels"
            raise VideoError(f"it has {needed} tokens, and the limit is {most} ({reason}): {self._remedy()}")

    def _remedy(self) -> str:
        return f"ask for less with {', '.join(self.known_kwargs)} of mm_processor_kwargs"

    @property
    def num_bytes(self) -> int:
        """Bytes that a job may allocate."""
        pixel_bytes = min(self.setup.max_rows * self.bytes_per_row, MAX_BUFFERS_BYTES)
        return self.setup.max_pixels * BYTES_PER_PIXEL + pixel_bytes * _COPIES + SPARE_BYTES

    def _of_file(self, job: VideoJob) -> Result:
        file = ClipFile(job.data, Limits(self.setup.max_pixels, self.setup.max_seconds, self.setup.max_frames))
        while True:
            timing = self.choose(file.num_frames, file.fps, *self._sampling(job.processor_kwargs))
            file.check(timing)
            # Check before anything is decoded.
            self.check_rows(len(timing.indices), file.height, file.width, job.processor_kwargs)
            try:
                return self.result(timing, file.pictures(timing), job.processor_kwargs)
            except FewerFramesError as error:
                file.num_frames = error.num_frames

    def _of_frames(self, job: VideoJob) -> Result:
        from PIL import Image

        assert job.size is not None, "frames have one"
        if sampling := job.processor_kwargs.keys() & {"num_frames", "fps"}:
            raise VideoError(f"mm_processor_kwargs has {', '.join(sorted(sampling))}, and all given frames are read")
        num_frames, height, width = job.size
        self.check_rows(num_frames, height, width, job.processor_kwargs)
        length = height * width * 3
        parts = [job.data[place * length : (place + 1) * length] for place in range(num_frames)]
        pictures = [Image.frombytes("RGB", (width, height), part) for part in parts]
        return self.result(Timing(job.fps or DEFAULT_FPS, job.num_total, job.indices), pictures, job.processor_kwargs)

    def _sampling(self, kwargs: Mapping[str, Any]) -> tuple[int, float]:
        """Return the maximum number of frames to read (-1: all), and the frames to read per second of video (0: no
        limit).

        Raises:
            VideoError: an argument is not a valid number.
        """
        own: dict[str, Any] = {"num_frames": self.num_frames, "fps": self.fps}
        if self.setup.num_frames:
            own = {"num_frames": self.setup.num_frames, "fps": self.setup.fps}
        for source in (self.setup.processor_kwargs, kwargs):
            own |= {key: source[key] for key in own if source.get(key) is not None}
        most, fps = own["num_frames"], own["fps"]
        if type(most) is not int or (most < 1 and most != -1):
            raise VideoError(f"num_frames is {most!r}; expected a positive integer, or -1 for all")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not math.isfinite(fps):
            raise VideoError(f"fps is {fps!r}; expected a number")
        return most, float(fps)


def read_settings(home: Path) -> dict[str, Any]:
    """Return the settings of a model's video processor, from the first file that contains them.

    Raises:
        OSError: there is none.
        ValueError: a file is not JSON.
    """
    for name in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        if (home / name).is_file():
            found = json.loads((home / name).read_text(encoding="utf-8"))
            own: dict[str, Any] = found.get("video_processor", {}) if name == "processor_config.json" else found
            if own:
                return own
    raise FileNotFoundError(f"{home} has no video_preprocessor_config.json")


def _load(setup: VideoSetup) -> Decoder:
    module, name = _FAMILIES.get(setup.architecture, ("qwen_video", "QwenVideos"))
    processor: VideoProcessor = getattr(import_module(f"octavo.frontend.media.{module}"), name)(setup)
    return Decoder(processor.process, processor.num_bytes, processor.placeholder, processor.placeholder_id)


if __name__ == "__main__":
    serve(VideoSetup, VideoJob, _load, Result)
