"""Encoders on a device: what the CPU makes of an item, and the same bits in any company.

The language models that read the rows are those of other tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny_audio_models
import tiny_dual
import tiny_phi4
import torch
from tiny_media import picture
from worker_plans import loaded, worker_config

from octavo.frontend.media.phi4 import Phi4Tiles
from octavo.protocol.buffers import Buffer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.media import EncoderInput, Kind, MediaTensor, StepMedia, digest_of
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.media.open import open_encoder
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Family:
    make: Callable[[Path], Path]
    arrays: Callable[[np.random.Generator], dict[str, Any]]
    num_rows: int
    kind: Kind = "image"

    def item(self, seed: int) -> EncoderInput:
        arrays = self.arrays(np.random.default_rng(seed))
        tensors = {
            name: MediaTensor(one.dtype.name, list(one.shape), Buffer(one.tobytes())) for name, one in arrays.items()
        }
        return EncoderInput(digest_of(tensors), self.num_rows, tensors, self.kind)


def normal(random: np.random.Generator, *shape: int) -> Floats:
    return random.standard_normal(shape).astype(np.float32)


def phi4_arrays(seed: int) -> dict[str, Any]:
    return dict(Phi4Tiles.read(tiny_phi4.TILES)(picture(seed, 20, 40)))


FAMILIES = {
    "clip": Family(tiny_dual.make_clip, lambda random: {"pixel_values": normal(random, 1, 3, 30, 30)}, 1),
    "phi4": Family(tiny_phi4.make_phi4, lambda random: phi4_arrays(int(random.integers(99))), 19),
    "phi4, audio": Family(
        tiny_phi4.make_phi4, lambda random: {"audio_input_features": normal(random, 1, 60, 80)}, 8, "audio"
    ),
    "siglip": Family(tiny_dual.make_siglip, lambda random: {"pixel_values": normal(random, 1, 3, 30, 30)}, 1),
    # 83 of 100 frames have audio: 42 rows of the encoder, the last of which is also made of frames after the clip.
    "qwen2_audio": Family(
        tiny_audio_models.make_qwen2_audio,
        lambda random: {
            "input_features": normal(random, 1, 20, 100),
            "feature_attention_mask": np.ones((1, 83), dtype=np.int64),
        },
        21,
        "audio",
    ),
    "voxtral": Family(
        tiny_audio_models.make_voxtral, lambda random: {"input_features": normal(random, 1, 20, 100)}, 25, "audio"
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def path(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.make(tmp_path_factory.mktemp("encoder"))


def encoded(model: Model, config: ResolvedConfig, stream: Stream | None, items: list[EncoderInput]) -> list[Floats]:
    """Encode items in one step; returns the rows or the vector of each."""
    with torch.inference_mode():
        encoder = open_encoder(model, config, stream)
        assert encoder is not None
        places = [(slot, 0, item.num_rows, slot, 0) for slot, item in enumerate(items)]
        media = StepMedia([], items, places, [item.digest for item in items])
        rows = encoder.rows_of_step(media)
        if stream is not None:
            stream.record_event().wait()
        vectors = encoder.vectors_of_step(media)
        return [vectors[slot]() for slot in sorted(vectors)] or [rows_RD.cpu().numpy() for _, _, rows_RD in rows]


@pytest.fixture(scope="module")
def computed_on_cpu(family: Family, path: Path) -> list[Floats]:
    config = worker_config(path)
    return encoded(loaded(config, is_native=False), config, None, [family.item(0)])


def test_the_rows_of_the_cpu(
    family: Family,
    path: Path,
    computed_on_cpu: list[Floats],
    _kernels_of_gpus: None,
    stream: Stream,
    device: torch.device,
) -> None:
    config = worker_config(path, device="cuda")
    model = load_model(config, lambda fraction: None, device=device)
    (alone,) = encoded(model, config, stream, [family.item(0)])
    np.testing.assert_allclose(alone, computed_on_cpu[0], atol=2e-5)
    _, company = encoded(model, config, stream, [family.item(1), family.item(0)])
    np.testing.assert_array_equal(company, alone)
