"""Images in the steps of a device: the tokens of the CPU, and the same bits in chunks and company, through graphs.

Towers run kernel by kernel between the steps, and their results stay on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama4
import tiny_media
import torch
from gpu_steps import assert_equal, driver
from pairwise import LONG_IF_INTERPRETED
from tiny_models import VOCAB_SIZE
from worker_plans import Driver, Running, loaded, spec, worker_config

from octavo.protocol.buffers import Buffer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.media import EncoderInput, GridSpan, MediaTensor, StepMedia, digest_of
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

SPEC = spec(temperature=1.0, seed=7, logprobs=1)
SETTINGS = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 48}
FIRST = 2
"""Position of an image."""


def tensor(values: Any, dtype: Any = np.float32) -> MediaTensor:
    array = np.ascontiguousarray(values, dtype=dtype)
    return MediaTensor(array.dtype.name, list(array.shape), Buffer(array.tobytes()))


def pixels(seed: int, *shape: int) -> MediaTensor:
    return tensor(np.random.default_rng(seed).standard_normal(shape))


@dataclass(frozen=True)
class Family:
    make: Callable[[Path], Path]
    tensors: Callable[[int], dict[str, MediaTensor]]
    """Of an image, by a seed."""
    num_rows: int
    grid: tuple[int, ...] = ()
    has_company: bool = False
    """Whether it is also computed in chunks and beside another request, through graphs."""
    is_span: bool = False
    """Whether the rows of an image attend to each other; a chunk has all of them then, and no graph."""


def qwen_tensors(patch: int, height: int, width: int) -> Callable[[int], dict[str, MediaTensor]]:
    grid = tensor([[1, height, width]], np.int64)
    return lambda seed: {"pixel_values": pixels(seed, height * width, patch), "image_grid_thw": grid}


def tiles_of_idefics3(seed: int) -> dict[str, MediaTensor]:
    masks = tensor(np.ones((1, 2, 24, 24)), np.int64)
    return {"pixel_values": pixels(seed, 1, 2, 3, 24, 24), "pixel_attention_mask": masks}


def tiles_of_llava_next(seed: int) -> dict[str, MediaTensor]:
    return {"pixel_values": pixels(seed, 1, 3, 3, 18, 18), "image_sizes": tensor([[18, 36]], np.int64)}


def frames_of_onevision(seed: int) -> dict[str, MediaTensor]:
    return {"pixel_values_videos": pixels(seed, 3, 3, 18, 18), "is_last": tensor([0, 0, 1], np.int64)}


PATCH = 3 * 2 * 6 * 6
ONE_LAYER = {"num_hidden_layers": 1, "no_rope_layers": [0], "interleave_moe_layer_step": 1, "floor_scale": 4}
"""Of Llama 4: requests have one group of blocks here."""
FAMILIES = {
    "llava": Family(tiny_media.make_llava, lambda seed: {"pixel_values": pixels(seed, 1, 3, 30, 30)}, 25),
    "qwen25_vl": Family(tiny_media.make_qwen25_vl, qwen_tensors(PATCH, 4, 6), 6, (1, 2, 3)),
    "qwen3_vl": Family(tiny_media.make_qwen3_vl, qwen_tensors(PATCH, 4, 6), 6, (1, 2, 3), has_company=True),
    "gemma3": Family(
        tiny_media.make_gemma3, lambda seed: {"pixel_values": pixels(seed, 1, 3, 36, 36)}, 9, (), True, is_span=True
    ),
    "idefics3": Family(tiny_media.make_smolvlm, tiles_of_idefics3, 8),
    "internvl": Family(tiny_media.make_internvl, lambda seed: {"pixel_values": pixels(seed, 2, 3, 24, 24)}, 8),
    "llama4": Family(
        partial(tiny_llama4.make_llama4, **ONE_LAYER), lambda seed: {"pixel_values": pixels(seed, 2, 3, 24, 24)}, 8
    ),
    "llava_next": Family(tiny_media.make_llava_next, tiles_of_llava_next, 30),
    "llava_onevision": Family(partial(tiny_media.make_llava_next, family="LlavaOnevision"), frames_of_onevision, 13),
    "mistral3": Family(tiny_media.make_mistral3, lambda seed: {"pixel_values": pixels(seed, 1, 3, 24, 36)}, 6),
    "qwen2_vl": Family(tiny_media.make_qwen2_vl, qwen_tensors(PATCH, 4, 6), 6, (1, 2, 3)),
}
"""The others differ from those in company in their towers alone, whose parts `test_varlen_attention` has in company."""
RELATED = ("internvl", "llava_next", "llava_onevision", "mistral3", "qwen2_vl")
"""Their towers are put together from those of the others, and tests/e2e/test_media_models.py compares them on a CPU."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=LONG_IF_INTERPRETED if name in RELATED else []) for name in FAMILIES],
)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def path(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.make(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def config(path: Path) -> ResolvedConfig:
    return worker_config(path, device="cuda", **SETTINGS)


@pytest.fixture(scope="module")
def model(config: ResolvedConfig, _kernels_of_gpus: None, device: torch.device) -> Model:
    return load_model(config, lambda fraction: None, device=device)


def prompt(family: Family) -> list[int]:
    return [5, 6, *[VOCAB_SIZE] * family.num_rows, 7]


def admit(core: Any, family: Family, slot: int) -> Running:
    request = core.admit(slot, prompt(family), SPEC)
    request.both_ways_spans = [(FIRST, family.num_rows)] if family.is_span else []
    request.grids = [GridSpan(FIRST, list(family.grid))] if family.grid else []
    return request


def media_of(family: Family, chunks: dict[int, tuple[int, int, int]], new: list[int]) -> StepMedia:
    """The media of a step: by slot the image's seed and the positions that are computed; `new` seeds are encoded."""
    items = {seed: family.tensors(seed) for seed in {seed for seed, _, _ in chunks.values()} | set(new)}
    digests = {seed: digest_of(tensors) for seed, tensors in items.items()}
    seeds, places = list(items), []
    for slot, (seed, start, end) in chunks.items():
        first, last = max(start, FIRST), min(end, FIRST + family.num_rows)
        if first < last:
            places.append((slot, first, last - first, seeds.index(seed), first - FIRST))
    inputs = [EncoderInput(digests[seed], family.num_rows, items[seed]) for seed in new]
    return StepMedia([], inputs, places, [digests[seed] for seed in seeds])


def whole(family: Family, slot: int, seed: int) -> StepMedia:
    return media_of(family, {slot: (seed, 0, len(prompt(family)))}, [seed])


@pytest.fixture(scope="module")
def computed_on_cpu(family: Family, path: Path) -> Running:
    config = worker_config(path, **SETTINGS)
    core = Driver(loaded(config, is_native=False), config)
    request = admit(core, family, 0)
    core.step(media=whole(family, 0, 0))
    core.run(2 * family.has_company)
    return request


def test_the_tokens_of_the_cpu(
    family: Family, model: Model, config: ResolvedConfig, stream: Stream, computed_on_cpu: Running
) -> None:
    alone = driver(model, config, stream, has_graphs=False)
    request = admit(alone, family, 0)
    alone.begin(media=whole(family, 0, 0))
    alone.run(2 * family.has_company)
    alone.executor.drain()
    alone.executor.close()
    assert_equal(request, computed_on_cpu)
    if not family.has_company:
        return
    core = driver(model, config, stream)
    chunked, other = admit(core, family, 3), admit(core, family, 1)
    middle, end = FIRST + family.num_rows // (1 if family.is_span else 2), len(prompt(family))
    core.begin({3: middle}, media=media_of(family, {3: (0, 0, middle)}, [1, 0]))  # both images in one run
    core.begin({3: end - middle, 1: end - 1}, media=media_of(family, {3: (0, middle, end), 1: (1, 0, end - 1)}, []))
    core.run(2)
    core.executor.close()
    assert (chunked.outputs, chunked.logprobs) == (request.outputs[:3], request.logprobs[:3])
    assert other.logprobs[0] != request.logprobs[0]
