"""Workers that share a model by layers: the same bits as one worker."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pairwise import pairwise
from step_recorder import without_time
from tiny_families import FAMILIES
from tiny_models import make_tiny
from worker_plans import NUM_BLOCKS, Driver, HostExecutor, Running, sampled_slots, spec, worker_config
from workloads import ask_all, random_requests

from octavo import LLM, AsyncClient
from octavo.kernels.native import library
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import WorkerSpec
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.protocol.steps import StepPlan, StepResult
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.parallel.open import join_peers
from octavo.worker_proc.parallel.stages import split_layers
from octavo.worker_proc.weights.load import load_model

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32}
SHAPES = {
    "LlamaForCausalLM": {**HEADS, "intermediate_size": 256, "num_hidden_layers": 5},
    "Qwen3ForCausalLM": {
        **HEADS,
        "intermediate_size": 256,
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        # In some stages no layer has a window, in others all have one.
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3],
    },
    "OPTForCausalLM": {"num_attention_heads": 4, "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 5},
    "GPT2LMHeadModel": {"n_head": 4, "n_embd": 128, "n_layer": 5},
    "Qwen3MoeForCausalLM": {"num_hidden_layers": 5},
    "DeepseekV3ForCausalLM": {"num_hidden_layers": 5},
}
DIVISIBLE = list(SHAPES)[:4]
"""Between ranks, with the same bits."""
SIZES = {"max_model_len": 128, "max_num_seqs": 4}
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: make_tiny(arch, folder / arch, **shape) for arch, shape in SHAPES.items()}


class Recording:
    """An executor that keeps its plans, as a core sends them to stages, and their results."""

    def __init__(self, executor: HostExecutor) -> None:
        self._executor = executor
        self._sampled: list[tuple[int, int]] = []
        self.steps: list[tuple[StepPlan, StepResult]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._executor.execute(plan)
        returned = [(slot, token_id) for slot, token_id in self._sampled if slot not in plan.released]
        self.steps.append((msgspec.structs.replace(plan, sampled=returned), result))
        self._sampled = list(zip(sampled_slots(plan, result), result.token_ids, strict=True))
        return result


def recorded(config: ResolvedConfig, kernels: NativeLibrary | None) -> list[tuple[StepPlan, StepResult]]:
    """Compute three requests in chunks and in one batch, then another one, then one with drafts, on one worker."""
    model = load_model(config, lambda _: None, library=kernels)
    recording = Recording(HostExecutor(model, config, NUM_BLOCKS * len(model.cache_groups)))
    driver = Driver(model, config, recording)
    samplings = [
        (5, spec(logprobs=2)),
        (40, spec(temperature=1.0, seed=3, logprobs=1, repetition_penalty=1.2)),
        (70, spec(prompt_logprobs=1)),
    ]
    requests: list[Running] = [
        driver.admit(slot, [(7 * slot + 3 * place) % 100 for place in range(length)], sampling)
        for slot, (length, sampling) in enumerate(samplings)
    ]
    driver.step({0: 5, 1: 13, 2: 31})
    driver.step({0: 1, 1: 27, 2: 39})
    driver.run(6)
    driver.release(requests[1].slot)
    driver.admit(1, list(range(9)), spec())
    driver.run(3)
    driver.release(requests[2].slot)
    known = requests[0].outputs
    driver.admit(2, requests[0].token_ids[:5], requests[0].sampling)
    driver.step()
    driver.step(draft_tokens={2: known[1:4], 0: [3, 4]})
    driver.step(draft_tokens={2: [*known[5:7], (known[7] + 1) % 100, 9]})
    driver.run(2)
    assert driver.running[2].outputs == known[: len(driver.running[2].outputs)]
    return recording.steps


def on_stages(config: ResolvedConfig, kernels: NativeLibrary, plans: list[StepPlan]) -> list[StepResult]:
    """Execute plans on the workers of a configuration, each in a thread, and return the results of the last stage."""
    descriptor = os.memfd_create("workers")

    def work(rank: int) -> list[StepResult]:
        addresses = {"plan_address": "", "result_address": ""}
        worker = WorkerSpec(config=config, rank=rank, world_size=config.world_size, exchange_fd=descriptor, **addresses)
        peers = join_peers(worker, kernels, torch.device("cpu"), Env.read())
        peers.barrier()
        exchanges = {"group": peers.group, "exchange": peers.stages}
        model = load_model(config, lambda _: None, library=kernels, rank=rank, **exchanges)
        results: list[StepResult] = []
        sizes = {"num_blocks": NUM_BLOCKS * len(model.cache_groups), "max_model_len": config.max_model_len}
        executor = open_executor(model, config, None, results.append, **sizes)
        for plan in plans:
            executor.begin(plan)
        return results

    threads = ThreadPoolExecutor(config.world_size)
    try:
        futures = [threads.submit(work, rank) for rank in range(config.world_size)]
        return [future.result(TIMEOUT_S) for future in futures][config.answering_rank]
    finally:
        threads.shutdown(wait=False)
        os.close(descriptor)


@pytest.mark.parametrize(
    ("arch", "num_stages", "size", "settings"),
    pairwise(
        list(SHAPES),
        [2, 3, 5],
        [1, 2],
        [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}],
    ),
)
def test_the_number_of_stages_changes_no_bit(
    models: dict[str, Path], arch: str, num_stages: int, size: int, settings: dict[str, Any]
) -> None:
    if arch not in DIVISIBLE:
        size = 1
    torch.set_num_threads(1)
    kernels = library.load()
    steps = recorded(worker_config(models[arch], **SIZES, **settings), kernels)
    sizes = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": size}
    config = worker_config(models[arch], **SIZES, **settings, **sizes)
    results = on_stages(config, kernels, [plan for plan, _ in steps])
    assert without_time(results) == without_time([result for _, result in steps])


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("gemma3", "bloom") else pytest.mark.long) for name in FAMILIES],
)
def test_stages_of_every_family_have_the_bits_of_one_worker(family: str, tmp_path: Path) -> None:
    arch, class_name, settings = FAMILIES[family]
    model = make_tiny(arch, tmp_path, class_name=class_name, **settings)
    torch.set_num_threads(1)
    kernels = library.load()
    steps = recorded(worker_config(model, **SIZES), kernels)
    results = on_stages(worker_config(model, pipeline_parallel_size=2, **SIZES), kernels, [plan for plan, _ in steps])
    assert without_time(results) == without_time([result for _, result in steps])


def test_stages_of_random_weights_are_those_of_the_whole_model(models: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    kernels, model = library.load(), models["LlamaForCausalLM"]
    steps = recorded(worker_config(model, load_format="dummy", **SIZES), kernels)
    config = worker_config(
        model, load_format="dummy", pipeline_parallel_size=2, pipeline_layer_partition="1,4", **SIZES
    )
    results = on_stages(config, kernels, [plan for plan, _ in steps])
    assert without_time(results) == without_time([result for _, result in steps])


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


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"pipeline_parallel_size": 6}, "the model has 5 layers", "--pipeline-parallel-size 5 or less"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "2,2"}, "with the sum 5", "such as 12,10"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "5,0"}, "not 2 positive numbers", "such as 12,10"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "five"}, "not 2 positive numbers", "such as"),
        ({"pipeline_layer_partition": "2,3"}, "not 1 positive numbers", "for each of --pipeline-parallel-size"),
    ],
)
def test_stages_that_do_not_fit_the_model_are_rejected(
    models: dict[str, Path], settings: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        worker_config(models["LlamaForCausalLM"], **settings)
    assert message in raised.value.message
    assert hint in raised.value.hint


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_stages_that_compute_through_torch_pass_the_same_bits_on(model: Path, size: int) -> None:
    settings = {"dtype": "bfloat16", "max_model_len": 256, "cpu_kernels": "torch", "tensor_parallel_size": size}
    requests = random_requests(seed=7, count=12, vocab_size=100)

    async def results(**sizes: int) -> list[list[Any]]:
        async with AsyncClient.launch(str(model), **settings, **sizes) as client:
            return await ask_all(client, requests)

    assert asyncio.run(results(pipeline_parallel_size=2)) == asyncio.run(results())


def test_an_engine_with_stages(model: Path, llm: LLM) -> None:
    """Workers of two stages start, answer many requests at once, and give the answers of one worker."""
    requests = random_requests(seed=21, count=25, vocab_size=100)

    async def expected() -> list[list[Any]]:
        async with AsyncClient.connect(llm.client.address) as client:
            return await ask_all(client, requests)

    async def results() -> list[list[Any]]:
        settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6, "num_gpu_blocks_override": 40}
        async with AsyncClient.launch(str(model), pipeline_parallel_size=2, **settings) as client:
            answers = await ask_all(client, requests)
            stats = await client.engine_stats()
            assert stats.num_free_blocks == stats.num_blocks == 40
            return answers

    assert asyncio.run(results()) == asyncio.run(expected())
