"""Videos whose frames are encoded as images of one size: LLaVA-OneVision and SmolVLM."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from octavo.frontend.media.frames import Timing
from octavo.frontend.media.result import result_of
from octavo.frontend.media.smolvlm import allow_smolvlm
from octavo.frontend.media.videos import VideoProcessor, read_settings
from octavo.frontend.media.wire import Result, VideoSetup
from octavo.frontend.media.without_torch import leave_out_videos

if TYPE_CHECKING:
    from PIL.Image import Image

Floats = npt.NDArray[np.float32]
_BICUBIC, _LANCZOS = 3, 1
"""Codes of the filters in processor files."""
_MAX_SIDE = 4096
"""Maximum side in pixels of a SmolVLM frame before it is resized to a square."""


class PictureVideos(VideoProcessor):
    """A processor of videos whose frames have a fixed size.

    Args:
        setup: settings of the process.

    Raises:
        ImportError, OSError, ValueError: see `VideoProcessor`.
    """

    def __init__(self, setup: VideoSetup) -> None:
        super().__init__(setup)
        import transformers
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        leave_out_videos()
        allow_smolvlm()
        self.settings = {**self.defaults(), **read_settings(Path(setup.processor_path))}
        self.processor: Any = transformers.AutoProcessor.from_pretrained(
            setup.processor_path, trust_remote_code=setup.trusts_remote_code, local_files_only=True
        )
        if not self.settings.get("do_resize", True) or self.settings.get("do_center_crop"):
            raise ValueError("do_resize of the processor of videos must be true, and do_center_crop false")
        self.placeholder = self.processor.video_token
        token_id = self.processor.tokenizer.get_vocab().get(self.placeholder)
        self.placeholder_id = -1 if token_id is None else token_id
        self.size = self.frame_size()
        kept = ("do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std")
        self._normalized: Any = SiglipImageProcessorPil(
            do_resize=False, **{key: self.settings[key] for key in kept if key in self.settings}
        )
        self.row_token = self.processor.tokenizer.convert_ids_to_tokens(setup.token_id)
        self.rows_per_frame = self.text(Timing(1.0, 2, [0, 1])).count(self.row_token)
        self.rows_per_frame -= self.text(Timing(1.0, 1, [0])).count(self.row_token)

    @property
    def bytes_per_row(self) -> int:
        """See `VideoProcessor`."""
        return self.size[0] * self.size[1] * 3 * 4 // self.rows_per_frame

    @abstractmethod
    def defaults(self) -> dict[str, Any]:
        """Return defaults for settings that the files may omit."""

    @abstractmethod
    def frame_size(self) -> tuple[int, int]:
        """Return the height and the width of a frame in pixels.

        Raises:
            ValueError: the files contain no size.
        """

    @abstractmethod
    def text(self, timing: Timing) -> str:
        """Return the text that stands for a video in the prompt."""

    @abstractmethod
    def tensors(self, frames: Floats) -> dict[str, Any]:
        """Return the tensors of a video, divisible by frame; `frames` has shape NCHW."""

    def resized(self, picture: "Image") -> "Image":
        """Return a frame resized to the size that the model expects."""
        if (picture.height, picture.width) == self.size:
            return picture
        return picture.resize(self.size[::-1], self.settings["resample"])

    def rows_of_frames(self, num_frames: int, height: int, width: int, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """See `VideoProcessor`."""
        return self.rows_per_frame, self.rows_per_frame * num_frames

    def result(self, timing: Timing, pictures: "Iterable[Image]", kwargs: Mapping[str, Any]) -> Result:
        """See `VideoProcessor`."""
        frames = [self._pixels(self.resized(picture)) for picture in pictures]
        text = self.text(timing)
        inputs = {
            **self.tensors(np.stack(frames)),
            "input_ids": np.array([self.processor.tokenizer.encode(text, add_special_tokens=False)]),
            "text_replacement_offsets": [[{"replacement": text}]],
        }
        part_rows = [self.rows_per_frame] * len(frames)
        part_rows[-1] = text.count(self.row_token) - sum(part_rows[:-1])
        return result_of(inputs, self.setup.token_id, part_rows=part_rows)

    def _pixels(self, picture: "Image") -> Floats:
        """Return the normalized pixels of a frame, shape CHW."""
        (pixels,) = self._normalized(images=[picture], return_tensors="np")["pixel_values"]
        return np.asarray(pixels, dtype=np.float32)


class OnevisionVideos(PictureVideos):
    """LLaVA-OneVision: a frame has fewer rows than an image, and a learned row follows the last frame."""

    def defaults(self) -> dict[str, Any]:
        """See `PictureVideos`."""
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        normal = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}
        return {"size": {"height": 384, "width": 384}, "resample": _BICUBIC, **normal}

    def frame_size(self) -> tuple[int, int]:
        """See `PictureVideos`."""
        size = self.settings["size"]
        if not isinstance(size, Mapping) or not {"height", "width"} <= size.keys():
            raise ValueError(f"size of the processor of videos is {size!r}; expected height and width")
        return size["height"], size["width"]

    def text(self, timing: Timing) -> str:
        """See `PictureVideos`."""
        return str(self.processor.replace_video_token({"pixel_values_videos": [timing.indices]}, 0))

    def tensors(self, frames: Floats) -> dict[str, Any]:
        """See `PictureVideos`."""
        is_last = np.zeros(len(frames), dtype=np.int64)
        is_last[-1] = 1
        return {"pixel_values_videos": frames, "is_last": is_last}


class SmolVideos(PictureVideos):
    """SmolVLM: the text of a video contains its duration, and the time of each frame."""

    def __init__(self, setup: VideoSetup) -> None:
        super().__init__(setup)
        sampling = self.settings.get("video_sampling") or {}
        if sampling:
            self.num_frames, self.fps = sampling["max_frames"], float(sampling["fps"])
        size = self.settings.get("size") or sampling.get("video_size") or {"longest_edge": 1456}
        self._longest: int | None = size.get("longest_edge")

    def defaults(self) -> dict[str, Any]:
        """See `PictureVideos`."""
        return {"resample": _LANCZOS}

    def frame_size(self) -> tuple[int, int]:
        """See `PictureVideos`."""
        side = self.settings.get("max_image_size", {"longest_edge": 364})["longest_edge"]
        return side, side

    def choose(self, num_frames: int, fps: float, most: int, wanted_fps: float) -> Timing:
        """See `VideoProcessor`."""
        return smolvlm_frames(num_frames, fps, most, wanted_fps)

    def text(self, timing: Timing) -> str:
        """See `PictureVideos`."""
        from transformers.video_utils import VideoMetadata

        indices = list(timing.indices)
        metadata = VideoMetadata(timing.num_frames, timing.fps, duration=timing.duration_s, frames_indices=indices)
        inputs = {"pixel_values": np.empty((1, len(indices))), "video_metadata": [metadata]}
        return str(self.processor.replace_video_token(inputs, 0))

    def tensors(self, frames: Floats) -> dict[str, Any]:
        """See `PictureVideos`: each frame is an image of one tile."""
        return {"pixel_values": frames[:, None]}

    def resized(self, picture: "Image") -> "Image":
        """See `PictureVideos`. Resizes first to the longest side of images, as in the training of the model."""
        if self._longest:
            picture = picture.resize(_with_longest(picture.size, self._longest), self.settings["resample"])
        return super().resized(picture)


def _with_longest(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return the width and the height of a picture with the given longest side; the other side is even."""
    longest = min(longest, _MAX_SIDE)
    width, height = size
    shorter = int(longest / (width / height)) if width >= height else int(longest * (width / height))
    shorter = max(1, shorter + shorter % 2)
    return (longest, shorter) if width >= height else (shorter, longest)


def smolvlm_frames(num_frames: int, fps: float, most: int, wanted_fps: float) -> Timing:
    """Choose the frames that SmolVLM reads: at equal distances, without the ends of a long video.

    Args:
        num_frames: number of frames of the complete video.
        fps: frame rate of the complete video.
        most: maximum number of frames to read; -1: all.
        wanted_fps: frames to read per second of video, up to `most` in total; 0 or less: as many as `most`.
    """
    most = num_frames if most < 0 else most
    duration_s = num_frames / fps
    wanted = round(min(wanted_fps * duration_s, num_frames)) if wanted_fps > 0 else num_frames
    count = max(1, min(most, wanted))
    first, last = 0, num_frames - 1
    if wanted_fps > 0 and duration_s - 2 > most * wanted_fps:
        first, last = int(fps), min(int(num_frames - fps), last)
    if first >= last:
        first, last = 0, num_frames - 1
    indices: Sequence[int] = np.unique(np.linspace(first, last, count, dtype=int)).tolist()
    return Timing(fps, num_frames, indices, duration_s)
