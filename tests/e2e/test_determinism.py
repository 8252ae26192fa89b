"""The promise: the same request gives the same tokens and logprob bits, whatever the engine does beside it.

The reference engine runs one request at a time, without prefix cache and without running ahead. The
others differ from it in everything that must not matter: batch size, chunk size, prefix cache,
pipelining, and a cache so small that requests are preempted all the time.
"""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from workloads import Ask, ask_all, ask_one_by_one, random_requests

from octavo.frontend.client import AsyncClient
from octavo.protocol.stats import EngineStats

COMMON: dict[str, Any] = {"max_model_len": 256}

ALONE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 256,
    "async_scheduling": False,
    "enable_prefix_caching": False,
}

STORMS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "tiny chunks": {"max_num_seqs": 7, "max_num_batched_tokens": 13, "block_size": 8},
    "constant preemption": {"max_num_seqs": 12, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 64},
    "drafts": {
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 6, "adaptive": False},
        "max_num_batched_tokens": 48,
        "max_num_seqs": 16,
        "block_size": 8,
        "num_gpu_blocks_override": 60,
    },
    "second storey": {
        "kv_offloading_size": 0.001,
        "kv_offloading_recompute": False,  # a tiny model may compute faster than files are read
        "num_gpu_blocks_override": 40,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    },
    "synchronous, one block size up": {"async_scheduling": False, "block_size": 32, "max_num_seqs": 5},
}


async def run(model: Path, dtype: str, settings: dict[str, Any], requests: list[Ask]) -> tuple[list[Any], EngineStats]:
    async with AsyncClient.launch(str(model), dtype=dtype, **{**COMMON, **settings}) as client:
        go = ask_one_by_one if settings is ALONE else ask_all
        results = await go(client, requests)
        if settings is not ALONE:  # again, in another order and with a warm cache
            again = await go(client, requests[::-1])
            assert again[::-1] == results
        return results, await client.engine_stats()


REQUESTS = random_requests(seed=7, count=40, vocab_size=100)


@cache
def alone(model: Path, dtype: str) -> list[Any]:
    """Return the results of all requests, computed one after another."""
    results, stats = asyncio.run(run(model, dtype, ALONE, REQUESTS))
    assert stats.num_preemptions == 0
    assert stats.prefix_cache_hits == 0
    return results


@pytest.mark.parametrize(
    ("dtype", "storm"),
    [
        ("float32", "defaults"),
        ("float32", "tiny chunks"),
        ("float32", "constant preemption"),
        pytest.param("bfloat16", "constant preemption", marks=pytest.mark.long),
        ("bfloat16", "drafts"),
        ("float32", "second storey"),
        ("bfloat16", "synchronous, one block size up"),
    ],
)
def test_a_request_in_a_storm_is_the_request_alone(model: Path, dtype: str, storm: str, tmp_path: Path) -> None:
    requests, expected = REQUESTS, alone(model, dtype)
    settings = STORMS[storm] | ({"kv_offloading_path": str(tmp_path)} if storm == "second storey" else {})
    results, stats = asyncio.run(run(model, dtype, settings, requests))
    for number, (got, want) in enumerate(zip(results, expected, strict=True)):
        assert got == want, f"request {number} changed: {requests[number]}"
    assert stats.num_free_blocks == stats.num_blocks, "blocks were lost"
    assert stats.prefix_cache_hits > 0
    assert (stats.spec_decode_num_accepted_tokens > 0) == (storm == "drafts")
    if storm == "second storey":
        assert stats.external_prefix_cache_hits > 0, "this storm is meant to load blocks"
    if storm == "constant preemption":
        assert stats.num_preemptions > 0, "this storm is meant to preempt"
