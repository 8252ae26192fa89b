"""Vectors on a GPU: its hidden states go through the same code as those of a CPU."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import tiny_dual
import torch
from gpu_steps import SETTINGS, prompt
from tiny_encoders import make_encoder
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import loaded, worker_config

from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.buffers import Buffer
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.events import Finished
from octavo.protocol.media import MediaItem, MediaTensor, digest_of
from octavo.protocol.params import PoolingSpec
from octavo.protocol.pooling import PoolingFacts
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepResult
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.facts import cache_group_specs
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphKind
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

EMBED = PoolingFacts(convert="embed", pooling="last")
NUM_BLOCKS = 40
FIRST, LAST, MEAN, ALL = (
    PoolingSpec("embed", "cls", skip_reading_prefix_cache=True),
    PoolingSpec("embed", "last"),
    PoolingSpec("embed", "mean", skip_reading_prefix_cache=True),
    PoolingSpec("token_embed", "all", skip_reading_prefix_cache=True),
)
Vectors = list[npt.NDArray[np.float32]]


def text(length: int, spec: PoolingSpec) -> Submit:
    return Submit(f"{spec.pooling} of {length}", prompt(length, seed=length), spec)


def picture(seed: int, spec: PoolingSpec, grid: list[int], num_rows: int, *shape: int) -> Submit:
    """A request that is a picture; with a grid, between two tokens."""
    arrays = {"pixel_values": np.random.default_rng(seed).standard_normal(shape).astype(np.float32)}
    edges = [5] * bool(grid)
    if grid:
        arrays["image_grid_thw"] = np.array([[1, 2 * grid[1], 2 * grid[2]]])  # type: ignore[assignment]
    tensors = {
        name: MediaTensor(one.dtype.name, list(one.shape), Buffer(one.tobytes())) for name, one in arrays.items()
    }
    item = MediaItem([(len(edges), num_rows)], digest_of(tensors), tensors, grid)
    image = VOCAB_SIZE if grid else 0
    return Submit(f"picture {seed}", [*edges, *[image] * num_rows, *edges], spec, media=[item])


@dataclass(frozen=True)
class Family:
    make: Callable[[Path], Path]
    cases: list[Submit]
    has_graphs: bool = False
    max_model_len: int = 40


FAMILIES = {
    "qwen3": Family(
        partial(make_tiny, "Qwen3ForCausalLM", num_hidden_layers=1),
        [text(3, LAST), text(40, MEAN), text(17, ALL), text(9, LAST)],
        has_graphs=True,
    ),
    "bert": Family(partial(make_encoder, "bert"), [text(9, FIRST), text(17, ALL), text(6, MEAN)], max_model_len=24),
    "clip": Family(
        tiny_dual.make_clip,
        [text(9, LAST), picture(1, LAST, [], 1, 1, 3, 30, 30), picture(2, LAST, [], 1, 1, 3, 30, 30)],
    ),
    "colqwen2": Family(tiny_dual.make_colqwen2, [text(5, ALL), picture(1, ALL, [1, 2, 3], 6, 24, 3 * 2 * 6 * 6)]),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model_path(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.make(tmp_path_factory.mktemp("pooling"))


@pytest.fixture(scope="module")
def computed_on_cpu(family: Family, model_path: Path) -> Vectors:
    config = pooling_config(model_path, family.max_model_len)
    return run(loaded(config, is_native=False), config, None, family.cases, has_graphs=False)


def pooling_config(path: Path, max_model_len: int, **settings: Any) -> ResolvedConfig:
    config = worker_config(path, **{**SETTINGS, "max_model_len": max_model_len}, **settings)
    facts = config.model.pooling or EMBED
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, pooling=facts))


def run(
    model: Model, config: ResolvedConfig, stream: Stream | None, cases: list[Submit], *, has_graphs: bool
) -> Vectors:
    """Run all requests at once, two steps in flight."""
    specs = cache_group_specs(model, config)
    plan = CachePlan(
        blocks_per_group=[NUM_BLOCKS],
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        kv_cache_bytes=0,
        cache_groups=specs,
    )
    scheduler = Scheduler(config, plan, lambda: 0.0)
    results: deque[StepResult] = deque()
    with torch.inference_mode():
        executor = open_executor(
            model, config, stream, results.append, num_blocks=NUM_BLOCKS, max_model_len=config.max_model_len
        )
        if has_graphs:
            graphs = executor.runner.graphs
            assert not graphs.uncaptured(GraphKind.SAMPLES) and not graphs.uncaptured(GraphKind.DECODES)
            executor.warm_up()
    vectors: dict[str, npt.NDArray[np.float32]] = {}
    for case in cases:
        scheduler.submit(b"", case)
    while scheduler.has_requests:
        for _ in range(2):
            if (step := scheduler.plan()) is not None:
                executor.begin(step)
        executor.drain()
        while results:
            for _, event in scheduler.commit(results.popleft()):
                assert isinstance(event, Finished) and event.result is not None
                data = np.frombuffer(event.result.data.data, np.float32)
                vectors[event.request_id] = data.reshape(event.result.shape)
    executor.close()
    return [vectors[case.request_id] for case in cases]


def test_vectors_are_those_of_the_cpu_and_do_not_depend_on_the_batch(
    family: Family, model_path: Path, computed_on_cpu: Vectors, _kernels_of_gpus: None, stream: Stream
) -> None:
    config = pooling_config(model_path, family.max_model_len, device="cuda")
    model = load_model(config, lambda fraction: None, device=stream.torch_device)
    together = run(model, config, stream, family.cases, has_graphs=family.has_graphs)
    for actual, expected in zip(together, computed_on_cpu, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    (alone,) = run(model, config, stream, family.cases[1:2], has_graphs=family.has_graphs)
    np.testing.assert_array_equal(alone, together[1])
