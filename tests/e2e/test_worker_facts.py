"""The measurements of a worker: they are right, and measuring changes nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import alone, loaded, spec, worker_config

from octavo.kernels.paged_attention import AttentionShape, plan
from octavo.kernels.paged_attention.cpu import workspace_bytes
from octavo.protocol.errors import NotEnoughMemoryError
from octavo.worker_proc.device.cpu import CpuDevice, freed_memory_returns
from octavo.worker_proc.facts import measure


@pytest.mark.parametrize("is_native", [False, True])
def test_facts_of_a_tiny_model(is_native: bool, tmp_path: Path) -> None:
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), max_num_seqs=8, block_size=32)
    model = loaded(config, is_native=is_native)
    facts = measure(model, CpuDevice(1), config, rank=3, free_bytes=7)
    assert (facts.rank, facts.free_bytes) == (3, 7)
    assert facts.cpu_kernels.startswith("native " if is_native else "torch ")
    checkpoint = load_file(Path(config.model.model_path) / "model.safetensors")
    checkpoint_bytes = sum(tensor.nbytes for tensor in checkpoint.values())
    # Packed weights are whole panels of 64 outputs.
    assert checkpoint_bytes <= facts.weights_bytes <= (1.5 if is_native else 1.0) * checkpoint_bytes
    assert facts.kv_block_bytes == 2 * 2 * 32 * 2 * 16 * 4  # k and v, layers, tokens, heads, dim, float32
    # Through torch, attention gathers the longest context.
    context_bytes = 0 if is_native else 2 * config.max_model_len * 2 * 16 * 4
    assert facts.activation_bytes >= 2 * 8 * VOCAB_SIZE * 4 + context_bytes


def test_the_peak_covers_the_tensors_that_a_step_through_torch_cannot_do_without(tmp_path: Path) -> None:
    width, budget = 4096, 2048
    directory = make_tiny("LlamaForCausalLM", tmp_path / "model", intermediate_size=width, num_hidden_layers=1)
    config = worker_config(directory, max_num_seqs=2, max_num_batched_tokens=budget)
    facts = measure(loaded(config, is_native=False), CpuDevice(1), config, rank=0, free_bytes=0)
    gate_and_up_bytes = budget * 2 * width * 4
    assert gate_and_up_bytes <= facts.activation_bytes <= 12 * gate_and_up_bytes


def test_activations_that_have_no_memory(tmp_path: Path) -> None:
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), max_num_batched_tokens=10**12)
    model = loaded(config)
    with pytest.raises(NotEnoughMemoryError, match="the activations of a step do not fit") as caught:
        measure(model, CpuDevice(1), config, rank=0, free_bytes=0)
    assert "--max-num-batched-tokens" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 64])
def test_attention_to_a_long_context_fits_what_is_counted_for_it(num_rows: int, dtype: torch.dtype) -> None:
    context_len, block_size, shape = 32768, 16, AttentionShape(9, 3, 64, 0.125)
    num_blocks = context_len // block_size
    cache = torch.ones(2, num_blocks, block_size, 3, 64, dtype=dtype)
    queries = torch.ones(num_rows, 9, 64, dtype=dtype)
    table = torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0)
    step = plan([0, num_rows], [context_len], table, block_size, shape)
    device = CpuDevice(1)
    step(queries, *cache)  # pages of code, and of the cache if the system has taken some away, count too
    with freed_memory_returns():  # otherwise the tests before decide what the C library keeps
        device.reset_peak()
        step(queries, *cache)
    counted = workspace_bytes(context_len, shape, dtype)
    # The rows' own scores are measured by the profiling steps; the kernel's count is of the context.
    rows_bytes = 16 * 2**20
    assert device.peak_growth_bytes() <= counted + rows_bytes
    assert counted <= 4 * cache.numel() * 4


def test_measuring_changes_no_token(tmp_path: Path) -> None:
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), max_num_seqs=4)
    model = loaded(config)
    torch_state = torch.get_rng_state()
    sampling = spec(temperature=1.0, seed=4, logprobs=2)
    before = alone(model, config, [5, 6, 7], sampling, 6)
    measure(model, CpuDevice(1), config, rank=0, free_bytes=0)
    after = alone(model, config, [5, 6, 7], sampling, 6)
    assert (before.outputs, before.logprobs) == (after.outputs, after.logprobs)
    assert torch.equal(torch.get_rng_state(), torch_state)
