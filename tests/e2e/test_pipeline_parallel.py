"""Workers that share a model by layers: the same bits as one worker, with several steps in flight."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pairwise import pairwise
from tiny_models import make_tiny
from worker_plans import NUM_BLOCKS, Driver, Running, spec, worker_config

from octavo.kernels.native import library
from octavo.kernels.stage_exchange.link import SharedMemoryLink, link_bytes
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.steps import StepPlan, StepResult
from octavo.worker_proc.executor.executor import PipelinedExecutor
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.parallel.stage_links import SharedMemoryStages, residual_width
from octavo.worker_proc.parallel.stages import split_layers
from octavo.worker_proc.weights.load import load_model

ARCHITECTURES = ["LlamaForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel"]
STEP_BYTES = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    layers = {arch: {"n_layer": 5} if arch == "GPT2LMHeadModel" else {"num_hidden_layers": 5} for arch in ARCHITECTURES}
    return {arch: make_tiny(arch, folder / arch, **layers[arch]) for arch in ARCHITECTURES}


class StagedExecutor:
    """The stages of a model in one thread: each computes a plan after the stage before it."""

    def __init__(self, models: list[Model], config: ResolvedConfig) -> None:
        self._results: list[StepResult] = []
        sizes = {"num_blocks": NUM_BLOCKS, "max_model_len": config.max_model_len}
        deliver = [lambda _: None] * (len(models) - 1) + [self._results.append]
        self._stages: list[PipelinedExecutor] = [
            open_executor(model, config, None, take, **sizes) for model, take in zip(models, deliver, strict=True)
        ]
        self._sampled: list[tuple[int, int]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = [(slot, token) for slot, token in self._sampled if slot not in plan.released]
        plan = msgspec.structs.replace(plan, sampled=sampled)
        for stage in self._stages:
            stage.begin(plan)
        (result,) = self._results
        self._results.clear()
        slots = [entry.slot for entry in plan.scheduled if entry.num_samples]
        self._sampled = list(zip(slots, result.token_ids, strict=True))
        return result


@contextmanager
def stages(path: Path, num_stages: int, **settings: Any) -> Iterator[tuple[list[Model], ResolvedConfig]]:
    """Load the stages of a model, linked through memory."""
    config = worker_config(path, max_model_len=128, max_num_seqs=4, pipeline_parallel_size=num_stages, **settings)
    descriptor = os.memfd_create("stages")

    def link(index: int) -> SharedMemoryLink:
        return SharedMemoryLink(descriptor, index * link_bytes(STEP_BYTES), STEP_BYTES)

    width, last = residual_width(config.model), num_stages - 1
    torch.set_num_threads(1)
    yield (
        [
            load_model(
                config,
                lambda _: None,
                library=library.load(),
                rank=index,
                exchange=SharedMemoryStages(
                    link(index - 1) if index else None, link(index) if index < last else None, width
                ),
            )
            for index in range(num_stages)
        ],
        config,
    )
    os.close(descriptor)


def generated(driver: Driver) -> list[Any]:
    """Return the tokens and logprobs of three requests, computed in chunks and in one batch."""
    samplings = [
        (5, spec(logprobs=2)),
        (40, spec(temperature=1.0, seed=3, logprobs=1, repetition_penalty=1.2)),
        (70, spec(prompt_logprobs=1)),
    ]
    requests: list[Running] = [
        driver.admit(slot, [(7 * slot + 3 * place) % 300 for place in range(length)], sampling)
        for slot, (length, sampling) in enumerate(samplings)
    ]
    driver.step({0: 5, 1: 13, 2: 31})
    driver.step({0: 1, 1: 27, 2: 39})
    driver.run(6)
    driver.release(1)
    again = driver.admit(1, list(range(9)), spec())
    driver.run(3)
    requests.append(again)
    return [(request.token_ids, request.logprobs, request.prompt_logprobs) for request in requests]


@pytest.mark.parametrize(
    ("arch", "num_stages", "settings"),
    pairwise(
        ARCHITECTURES,
        [2, 3, 5],
        [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}, {"load_format": "dummy"}],
    ),
)
def test_the_number_of_stages_changes_no_bit(
    models: dict[str, Path], arch: str, num_stages: int, settings: dict[str, Any]
) -> None:
    whole = worker_config(models[arch], max_model_len=128, max_num_seqs=4, **settings)
    expected = generated(Driver(load_model(whole, lambda _: None, library=library.load()), whole))
    with stages(models[arch], num_stages, **settings) as (parts, config):
        driver = Driver(parts[0], config, StagedExecutor(parts, config))
        assert generated(driver) == expected


@pytest.mark.parametrize(
    ("layers", "output", "num_stages", "counts"),
    [
        ([1, 1, 1, 1], 0, 2, [2, 2]),
        ([1, 1, 1, 1, 1], 0, 2, [2, 3]),
        ([1] * 30, 4, 2, [17, 13]),
        ([5, 1, 1, 1], 0, 2, [1, 3]),
        ([1, 1, 1], 100, 3, [1, 1, 1]),
        ([2] * 32, 1, 4, [8, 8, 8, 8]),
    ],
)
def test_stages_have_weights_of_about_the_same_size(layers, output, num_stages, counts) -> None:
    assert split_layers(layers, output, num_stages) == counts
