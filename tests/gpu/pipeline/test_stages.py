"""Stages of a model on GPUs: each in a process with its own graphs, here with Gloo in place of NCCL."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from gpu_steps import SETTINGS, SPECS, new_stream, prompt
from step_recorder import StepRecorder, without_time
from tiny_models import make_tiny
from torch.distributed import FileStore  # type: ignore[attr-defined]
from triton_interpreter import IS_INTERPRETING
from worker_plans import Driver, worker_config

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.parallel.distributed import join_all
from octavo.worker_proc.parallel.stage_links import DistributedStages, GraphStages, residual_width
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphKind
from octavo.worker_proc.weights.load import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN"),
    pytest.mark.xdist_group("pipeline"),
    pytest.mark.skipif(not IS_INTERPRETING, reason="stages are forked processes, which cannot use a GPU"),
]
CPU = torch.device("cpu")
LIMIT_S = 120.0


def compute_stage(config: ResolvedConfig, whole: StepRecorder, rendezvous: Path, warms_up: bool, rank: int) -> None:
    torch.set_num_threads(1)
    join_all("cpu", FileStore(str(rendezvous), 2), rank, 2)
    width = residual_width(config.model)
    link = DistributedStages(rank, 1, width, torch.float32)
    stages = GraphStages(link, config.max_num_batched_tokens, width, torch.float32, CPU)
    model = load_model(config, lambda fraction: None, device=CPU, rank=rank, exchange=stages)
    executor = StepRecorder(model, config, new_stream(CPU))
    if warms_up:
        executor.executor.warm_up()
    graphs = executor.executor.runner.graphs
    for kind in (GraphKind.PROMPTS, GraphKind.DECODES):
        for size in graphs.uncaptured(kind):
            with torch.inference_mode():
                graphs.capture(kind, size)
    for plan in whole.plans:
        executor.compute(plan)
    if rank == 1:
        assert without_time(executor.results) == without_time(whole.results)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("warms_up", [False, pytest.param(True, marks=pytest.mark.long)])
def test_stages_have_the_bits_of_one_gpu(tmp_path: Path, _kernels_of_gpus: None, warms_up: bool) -> None:
    directory = make_tiny("LlamaForCausalLM", tmp_path / "model", num_hidden_layers=2)
    settings = {**SETTINGS, "dtype": "float32", "device": "cuda"}
    config = worker_config(directory, **settings)
    model = load_model(config, lambda fraction: None, device=CPU)
    whole = StepRecorder(model, config, new_stream(CPU))
    driver = Driver(model, config, whole)
    driver.admit(0, prompt(5), SPECS["filtered"])
    driver.admit(1, prompt(9, seed=1), SPECS["penalized"])
    driver.step({0: 5, 1: 3})
    driver.step({0: 1, 1: 6})
    driver.step()
    driver.step(draft_tokens={0: [5, 6], 1: [7]})
    driver.step()
    config = worker_config(directory, **settings, pipeline_parallel_size=2)
    fork = multiprocessing.get_context("fork")
    stages = [
        fork.Process(target=compute_stage, args=(config, whole, tmp_path / "ranks", warms_up, rank))
        for rank in range(2)
    ]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join(LIMIT_S)
    codes = [stage.exitcode for stage in stages]
    for stage in stages:
        stage.kill()
    assert codes == [0, 0]
