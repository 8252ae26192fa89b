"""Steps of a model with windows in some layers: graphs with block tables and attention plans of several groups."""

from collections import deque
from pathlib import Path

import pytest
import torch
from gpu_steps import SETTINGS, prompt
from small_engine import SmallEngine, TimedRequest
from tiny_models import make_tiny
from worker_plans import loaded, spec, worker_config

from octavo.core_proc.invariants import check
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.events import Tokens
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepResult
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.facts import cache_group_specs
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphKind
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

NUM_BLOCKS = 13
"""For one of the requests and a part of the other, so that one is preempted."""
REQUESTS = [(prompt(14, seed=1), 9), (prompt(7, seed=2), 9)]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "Qwen2ForCausalLM",
        tmp_path_factory.mktemp("windows"),
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )


@pytest.fixture(scope="module")
def computed_on_cpu(windowed: Path) -> list[list[int]]:
    """The tokens of each request alone."""
    config = worker_config(windowed, **SETTINGS)
    engine = SmallEngine(loaded(config), config, 200)
    results = [engine.run([TimedRequest(tokens, spec(max_tokens=number))])[0] for tokens, number in REQUESTS]
    return [result.token_ids for result in results]


def run(model: Model, config: ResolvedConfig, stream: Stream) -> tuple[list[list[int]], int]:
    """Run all requests at once; return their tokens, and how often one was preempted."""
    specs = cache_group_specs(model, config)
    plan = CachePlan(
        blocks_per_group=[NUM_BLOCKS] * len(specs),
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
        for kind in GraphKind:
            for size in graphs.uncaptured(kind):
                graphs.capture(kind, size)
    tokens: list[list[int]] = [[] for _ in REQUESTS]
    for number, (token_ids, max_tokens) in enumerate(REQUESTS):
        scheduler.submit(b"", Submit(str(number), token_ids, spec(max_tokens=max_tokens)))
    while scheduler.has_requests:
        for _ in range(2):
            if (step := scheduler.plan()) is not None:
                executor.begin(step)
            check(scheduler)
        executor.drain()
        while results:
            for _, event in scheduler.commit(results.popleft()):
                for part in getattr(event, "parts", [event]):
                    if isinstance(part, Tokens):
                        tokens[int(part.request_id)] += part.token_ids
    executor.close()
    return tokens, scheduler.counters.num_preemptions


def test_windows_free_blocks_that_other_groups_use_with_the_tokens_of_the_cpu(
    windowed: Path, computed_on_cpu: list[list[int]], _kernels_of_gpus: None, stream: Stream
) -> None:
    config = worker_config(windowed, device="cuda", **SETTINGS)
    model = load_model(config, lambda fraction: None, device=stream.torch_device)
    assert [(group.shape.window, len(group.layers)) for group in model.cache_groups] == [(5, 1), (None, 1)]
    tokens, num_preemptions = run(model, config, stream)
    assert tokens == computed_on_cpu
    assert num_preemptions == 1
