"""What a worker keeps of images that it has made vectors of."""

import gc
import weakref
from typing import Any, cast

import numpy as np
import pytest
import torch

from octavo.frontend.media.live_bytes import LiveBuffer
from octavo.protocol.media import EncoderInput, MediaTensor, StepMedia
from octavo.worker_proc.media.encoder import MediaEncoder

DIGEST = bytes(32)


class Head:
    def prepare(self) -> None:
        pass

    def __call__(self, row_D: Any) -> Any:
        return row_D * 2


class Tower:
    """The runner of a tower, and the tower."""

    def __init__(self) -> None:
        self.tower, self.pooling_head = self, Head()
        self.rows: list[weakref.ref[torch.Tensor]] = []

    def encode(self, items: list[EncoderInput]) -> list[torch.Tensor]:
        rows = [torch.ones(1, 3) for _ in items]
        self.rows += map(weakref.ref, rows)
        return rows

    def arrange(self, rows_RD: torch.Tensor, tensors: object) -> torch.Tensor:
        return rows_RD.clone()


class Stream:
    def download(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@pytest.mark.parametrize("stream", [None, Stream()])
def test_neither_pixels_nor_rows_outlive_the_vector(stream: Stream | None) -> None:
    runner = Tower()
    encoder = MediaEncoder({"image": cast(Any, runner)}, stream=cast(Any, stream))
    pixels = LiveBuffer(bytes(12))
    alive = weakref.ref(pixels)
    step = StepMedia(
        [], [EncoderInput(DIGEST, 1, {"pixels": MediaTensor("float32", [3], pixels)})], [(0, 0, 1, 0, 0)], [DIGEST]
    )
    encoder.rows_of_step(step)
    del step, pixels
    gc.collect()
    assert alive() is None, "the item is not part of the vector that is not made yet"
    assert (runner.rows[0]() is None) == (stream is None), "the host makes the vector at once"
    (vector,) = encoder.vectors_of_step(StepMedia([], [], [(5, 0, 1, 0, 0)], [DIGEST])).values()
    assert np.array_equal(vector(), [2, 2, 2]) and np.array_equal(vector(), [2, 2, 2])
    gc.collect()
    assert runner.rows[0]() is None
