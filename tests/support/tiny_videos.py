"""Random videos, as arrays and as files, and what stands for the processors of videos of `transformers`."""

import io
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import torch
import transformers
from av.stream import Disposition

Frames = npt.NDArray[np.uint8]


def clip(seed: int, num_frames: int = 4, height: int = 36, width: int = 24) -> Frames:
    """Return frames of random pixels: shape (frames, height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def clip_file(
    frames: Frames,
    fps: float = 4,
    codec: str = "ffv1",
    container: str = "matroska",
    times_ms: Sequence[int | None] | None = None,
) -> bytes:
    """Return a file with these frames, which FFV1 keeps as they are; `times_ms`: when each is shown."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = {"ffv1": "bgr0", "gif": "rgb8"}.get(codec, "yuv420p")
        for frame, time_ms in zip(frames, times_ms or [None] * len(frames), strict=True):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if time_ms is not None:
                picture.pts, picture.time_base = time_ms, Fraction(1, 1000)
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
    return file.getvalue()


def sound_file(*, has_cover: bool) -> bytes:
    """Return an MP4 file without video: an audio track, optionally with cover art."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("aac", rate=16_000)
        if has_cover:
            cover: Any = output.add_stream("mjpeg", rate=1)
            cover.width, cover.height, cover.pix_fmt = 24, 24, "yuvj420p"
            cover.disposition = Disposition.attached_pic
            output.mux([*cover.encode(av.VideoFrame.from_ndarray(clip(1, 1, 24)[0], format="rgb24")), *cover.encode()])
        samples: Any = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        samples.rate, samples.pts = 16_000, 0
        output.mux([*stream.encode(samples), *stream.encode()])
    return file.getvalue()


class VideosByFormula:
    """Computes what the processors of Qwen-VL, which need torchvision, compute of frames that keep their size."""

    merge_size, temporal_patch_size = 2, 2

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __call__(self, videos: list[Frames], video_metadata: Any = None, **_kwargs: Any) -> dict[str, Any]:
        patches, grids = zip(*[self._patches(frames) for frames in videos], strict=True)
        return {
            "pixel_values_videos": torch.from_numpy(np.concatenate(patches)),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": video_metadata,
        }

    def _patches(self, frames: Frames) -> tuple[Any, list[int]]:
        own, merge = self._settings, self.merge_size
        values = (frames.astype(np.float32) / 255 - own.image_mean) / own.image_std
        groups, size = -(-len(values) // 2), own.patch_size
        values = np.concatenate([values, values[-1:]])[: 2 * groups].astype(np.float32)
        rows, columns = frames.shape[1] // size, frames.shape[2] // size
        cut = values.reshape(groups, 2, rows // merge, merge, size, columns // merge, merge, size, 3)
        return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(groups * rows * columns, -1), [groups, rows, columns]


class PicturesByFormula:
    """Computes what the processors of LLaVA-OneVision and SmolVLM compute of frames that keep their size."""

    def __init__(self, path: Path, name: str) -> None:
        settings = json.loads((path / "video_preprocessor_config.json").read_text())
        self._mean, self._std, self._name = settings["image_mean"], settings["image_std"], name

    def __call__(self, videos: list[Frames], video_metadata: Any = None, **_kwargs: Any) -> dict[str, Any]:
        values = (np.stack(videos).astype(np.float32) / 255 - self._mean) / self._std
        pixels = torch.from_numpy(values.transpose(0, 1, 4, 2, 3).astype(np.float32))
        return {self._name: pixels, "video_metadata": video_metadata}


def processor_of(path: Path) -> Any:
    """Return the model's processor, with its part for videos by the formula."""
    processor: Any = transformers.AutoProcessor.from_pretrained(path)
    if (path / "video_preprocessor_config.json").exists():
        is_smolvlm = type(processor).__name__ == "SmolVLMProcessor"
        processor.video_processor = PicturesByFormula(path, "pixel_values" if is_smolvlm else "pixel_values_videos")
    else:
        processor.video_processor = VideosByFormula(processor.image_processor)
    return processor
