"""LoRA adapters on several ranks and stages: the bits of one worker, and loads that fail on all of them."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft_adapters import load_of, write_adapter
from rank_threads import TIMEOUT_S, on_ranks
from tiny_models import make_tiny
from worker_plans import NUM_BLOCKS, Driver, HostExecutor, spec, worker_config

from octavo.kernels.all_reduce.native import exchanged_bytes
from octavo.kernels.native import library
from octavo.kernels.native.rank_group import SharedMemoryGroup
from octavo.protocol.adapters import AdapterLoad
from octavo.protocol.control import WorkerSpec
from octavo.protocol.env import Env
from octavo.worker_proc.lora.loader import open_adapters
from octavo.worker_proc.parallel.distributed import DistributedRanks
from octavo.worker_proc.parallel.group import SharedMemoryRanks
from octavo.worker_proc.parallel.open import join_peers
from octavo.worker_proc.weights.load import load_model

SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "head_dim": 32,
    "intermediate_size": 512,
    "tie_word_embeddings": True,
}
TARGETS = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("lora")
    model = make_tiny("LlamaForCausalLM", folder / "model", **SIZES)
    adapters = [folder / "a", folder / "b"]
    write_adapter(model, adapters[0], 0, r=24, target_modules=TARGETS)
    write_adapter(model, adapters[1], 1, r=5, target_modules=["down_proj", "v_proj"])
    return model, adapters


def gone(load: AdapterLoad) -> AdapterLoad:
    """Return a load whose files this rank does not find."""
    adapter = msgspec.structs.replace(load.adapter, path=load.adapter.path + "-gone")
    return msgspec.structs.replace(load, adapter=adapter)


class ThreadRanks(DistributedRanks):
    """Ranks that compute through torch, as threads of this process."""

    def __init__(self, rank: int, size: int, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self._parts, self._barrier = parts, barrier

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        self._parts[self._rank] = part
        self._barrier.wait()
        gathered = torch.stack(self._parts)
        self._barrier.wait()
        return gathered


def on_size(
    paths: tuple[Path, list[Path]], size: int, fails_on: int | None = None, *, is_native: bool = True, **settings: Any
) -> list[Any]:
    """Return what each of `size` ranks generates, and the faults of its loads; one rank may not find the files."""
    path, adapters = paths
    limits = {"max_model_len": 128, "max_num_seqs": 4, "enable_lora": True, "max_loras": 2, "max_lora_rank": 24}
    config = worker_config(path, tensor_parallel_size=size, **limits, **settings)
    kernels = library.load()
    meeting = [torch.empty(0)] * size, threading.Barrier(size, timeout=TIMEOUT_S)

    def compute(group: SharedMemoryGroup) -> Any:
        ranks = SharedMemoryRanks(group) if is_native else ThreadRanks(group.rank, size, *meeting)
        model = load_model(
            config,
            lambda _: None,
            library=kernels if is_native else None,
            rank=group.rank,
            group=ranks if size > 1 else None,
        )
        executor = HostExecutor(model, config, NUM_BLOCKS, open_adapters(model, config))
        driver = Driver(model, config, executor)
        loads = [load_of(path, slot) for slot, path in enumerate(adapters)]
        if group.rank == fails_on:
            loads[1] = gone(loads[1])
        driver.adapter_loads = loads
        requests = [
            driver.admit(
                slot, [(7 * slot + 3 * place) % 300 for place in range(20)], spec(logprobs=1), adapter_slot=slot - 1
            )
            for slot in range(3)
        ]
        faults = driver.step({0: 5, 1: 13, 2: 7}).adapter_faults
        driver.step({0: 15, 1: 7, 2: 13})
        driver.run(4)
        return [(request.token_ids, request.logprobs) for request in requests], [fault.slot for fault in faults]

    torch.set_num_threads(1)
    area_bytes = max(exchanged_bytes(config.max_num_batched_tokens, 3 * 256, size), 64 * config.model.vocab_size * 4)
    return on_ranks(kernels, size, area_bytes, compute)


@pytest.mark.parametrize(
    ("size", "dtype", "is_fully_sharded"), [(2, "bfloat16", False), (4, "float32", False), (2, "bfloat16", True)]
)
def test_the_number_of_ranks_changes_no_bit(
    paths: tuple[Path, list[Path]], size: int, dtype: str, is_fully_sharded: bool
) -> None:
    settings = {"dtype": dtype, "fully_sharded_loras": is_fully_sharded}
    (alone,) = on_size(paths, 1, **settings)
    assert len({tuple(tokens) for tokens, _ in alone[0]}) == 3
    assert on_size(paths, size, **settings) == [alone] * size


def test_ranks_that_compute_through_torch_divide_both_factors(paths: tuple[Path, list[Path]]) -> None:
    settings = {"fully_sharded_loras": True}
    (alone,) = on_size(paths, 1, **settings)
    ranks = on_size(paths, 2, is_native=False, **settings)
    assert ranks[0] == ranks[1]
    for (tokens, logprobs), (expected_tokens, expected) in zip(ranks[0][0], alone[0], strict=True):
        assert tokens == expected_tokens
        found, wanted = ([entry.logprobs for entry in entries] for entries in (logprobs, expected))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-4)


def test_a_load_that_one_rank_misses_fails_on_all(paths: tuple[Path, list[Path]]) -> None:
    (alone,) = on_size(paths, 1)
    for requests, faults in on_size(paths, 2, fails_on=1):
        assert faults == [1] and requests[:2] == alone[0][:2]
        assert requests[2] != alone[0][2]


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_stage_knows_what_any_stage_has_not_loaded(paths: tuple[Path, list[Path]], size: int) -> None:
    path, adapters = paths
    settings = {"tensor_parallel_size": size, "pipeline_parallel_size": 2, "max_model_len": 128}
    config = worker_config(path, enable_lora=True, max_loras=2, max_lora_rank=24, **settings)
    kernels, loads = library.load(), [load_of(adapter, slot) for slot, adapter in enumerate(adapters)]
    descriptor = os.memfd_create("workers")

    def faults(rank: int) -> list[tuple[int, str]]:
        """Return those of two loads, of which a worker of each stage misses one, and of the same loads on all."""
        addresses = {"plan_address": "", "result_address": ""}
        worker = WorkerSpec(config=config, rank=rank, world_size=config.world_size, exchange_fd=descriptor, **addresses)
        peers = join_peers(worker, kernels, torch.device("cpu"), Env.read())
        peers.barrier()
        exchanges = {"group": peers.group, "exchange": peers.stages}
        loader = open_adapters(load_model(config, lambda _: None, library=kernels, rank=rank, **exchanges), config)
        missed = [0, config.world_size - 1]
        tried = [gone(load) if rank == other else load for load, other in zip(loads, missed, strict=True)]
        return [(fault.slot, fault.digest) for fault in loader.apply([*tried, *loads])]

    torch.set_num_threads(1)
    threads = ThreadPoolExecutor(config.world_size)
    try:
        *_, last = [future.result(60) for future in [threads.submit(faults, rank) for rank in range(config.world_size)]]
    finally:
        threads.shutdown(wait=False)
        os.close(descriptor)
    assert last == [(load.slot, load.adapter.digest) for load in loads]
