"""Ranks that share every layer on GPUs: each is a process here, with Gloo in place of NCCL."""

from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import on_forked_ranks
from gpu_steps import SETTINGS, SPECS, new_stream, prompt
from step_recorder import StepRecorder, without_time
from tiny_heads import make_head
from tiny_models import make_tiny
from triton_interpreter import IS_INTERPRETING
from worker_plans import Driver, worker_config

from octavo.kernels import linear
from octavo.kernels.linear import gpu as linear_gpu
from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.parallel.distributed import DistributedRanks
from octavo.worker_proc.weights.load import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN"),
    pytest.mark.xdist_group("pipeline"),
    pytest.mark.skipif(not IS_INTERPRETING, reason="ranks are forked processes, which cannot use a GPU"),
]
CPU = torch.device("cpu")
MODEL = {
    "hidden_size": 48,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # ranks share them if they are four
}


def compute_rank(config: ResolvedConfig, whole: StepRecorder, group: DistributedRanks, rank: int) -> None:
    model = load_model(config, lambda fraction: None, device=CPU, rank=rank, group=group)
    own = StepRecorder(model, config, new_stream(CPU))
    for plan in whole.plans:
        own.compute(plan)
    assert without_time(own.results) == without_time(whole.results)


def compute_ranks(config: ResolvedConfig, whole: StepRecorder, rendezvous: Path) -> None:
    """Compute the plans of `whole` with ranks in processes of their own."""
    on_forked_ranks(config.tensor_parallel_size, rendezvous, partial(compute_rank, config, whole))


@pytest.mark.parametrize(
    ("architecture", "dtype", "sizes"),
    [
        ("LlamaForCausalLM", "bfloat16", [4]),
        pytest.param("LlamaForCausalLM", "float32", [2, 8], marks=pytest.mark.long),
        pytest.param("MixtralForCausalLM", "bfloat16", [2, 4], marks=pytest.mark.long),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(
    tmp_path: Path,
    _kernels_of_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    dtype: str,
    sizes: list[int],
) -> None:
    monkeypatch.setitem(linear._PACKERS, "cuda", linear_gpu.Packer)
    directory = make_tiny(architecture, tmp_path / "model", **MODEL)
    settings = {**SETTINGS, "dtype": dtype, "device": "cuda", "enforce_eager": True}
    settings["enable_tp_invariant_inference"] = True
    config = worker_config(directory, **settings)
    model = load_model(config, lambda fraction: None, device=CPU)
    whole = StepRecorder(model, config, new_stream(CPU))
    driver = Driver(model, config, whole)
    driver.admit(0, prompt(5), SPECS["filtered"])
    driver.admit(1, prompt(9, seed=1), SPECS["penalized"])
    driver.step({0: 5, 1: 3})
    driver.step({0: 1, 1: 6})
    for size in sizes:
        ranks_share = {"tensor_parallel_size": size, "enable_expert_parallel": "Mixtral" in architecture}
        compute_ranks(worker_config(directory, **settings, **ranks_share), whole, tmp_path / f"ranks{size}")


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_ranks_draft_and_verify_as_one_gpu(
    tmp_path: Path, _kernels_of_gpus: None, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setitem(linear._PACKERS, "cuda", linear_gpu.Packer)
    directory = make_tiny("LlamaForCausalLM", tmp_path / "model", **MODEL)
    drafter = tmp_path / method
    if method == "eagle":
        make_head(method, drafter)
    else:
        make_tiny("LlamaForCausalLM", drafter, seed=1, **MODEL)
    settings = {**SETTINGS, "dtype": "bfloat16", "device": "cuda", "enforce_eager": True}
    settings["enable_tp_invariant_inference"] = True
    settings["speculative_config"] = {"method": method, "model": str(drafter), "num_speculative_tokens": 2}
    config = worker_config(directory, **settings)
    whole = StepRecorder(load_model(config, lambda fraction: None, device=CPU), config, new_stream(CPU))
    driver = Driver(whole.model, config, whole)
    driver.admit(0, prompt(5), SPECS["filtered"])
    driver.admit(1, prompt(9, seed=1), SPECS["greedy"])
    result = driver.step(num_drafts=2)
    for _ in range(2):
        result = driver.step(num_drafts=2, draft_tokens={slot: list(drafts) for slot, drafts in result.drafts})
    assert len(result.earlier_drafts) == 2
    compute_ranks(worker_config(directory, **settings, tensor_parallel_size=2), whole, tmp_path / "ranks")
