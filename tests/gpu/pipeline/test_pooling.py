"""Vectors on a GPU: its hidden states go through the same code as those of a CPU."""

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gpu_steps import SETTINGS, prompt
from small_engine import SmallEngine, TimedRequest
from tiny_models import make_tiny
from worker_plans import loaded, worker_config

from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.events import Finished
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
PROMPTS = [prompt(length, seed=length) for length in (3, 40, 17, 9)]
SPECS = [
    PoolingSpec("embed", "last"),
    PoolingSpec("embed", "mean", skip_reading_prefix_cache=True),
    PoolingSpec("token_embed", "all", skip_reading_prefix_cache=True),
]
CASES = [(text, SPECS[place % len(SPECS)]) for place, text in enumerate(PROMPTS)]
Vectors = list[npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("Qwen3ForCausalLM", tmp_path_factory.mktemp("pooling"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def computed_on_cpu(model_path: Path) -> Vectors:
    config = pooling_config(model_path)
    engine = SmallEngine(loaded(config), config, 200)
    vectors = [result.vector for result in engine.run([TimedRequest(text, spec) for text, spec in CASES])]
    return [np.frombuffer(vector[0], np.float32).reshape(vector[1]) for vector in vectors if vector is not None]


def pooling_config(path: Path, **settings: Any) -> ResolvedConfig:
    config = worker_config(path, **SETTINGS, **settings)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, pooling=EMBED))


def run(model: Model, config: ResolvedConfig, stream: Stream, cases: list[tuple[list[int], PoolingSpec]]) -> Vectors:
    """Run all requests at once, through graphs, two steps in flight."""
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
        graphs = executor.runner.graphs
        assert not graphs.uncaptured(GraphKind.SAMPLES) and not graphs.uncaptured(GraphKind.DECODES)
        executor.warm_up()
    vectors: dict[str, npt.NDArray[np.float32]] = {}
    for number, (token_ids, spec) in enumerate(cases):
        scheduler.submit(b"", Submit(str(number), token_ids, spec))
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
    return [vectors[str(number)] for number in range(len(cases))]


def test_vectors_are_those_of_the_cpu_and_do_not_depend_on_the_batch(
    model_path: Path, computed_on_cpu: Vectors, _kernels_of_gpus: None, stream: Stream
) -> None:
    config = pooling_config(model_path, device="cuda")
    model = load_model(config, lambda fraction: None, device=stream.torch_device)
    together = run(model, config, stream, CASES)
    for actual, expected in zip(together, computed_on_cpu, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    (alone,) = run(model, config, stream, CASES[1:2])
    np.testing.assert_array_equal(alone, together[1])
