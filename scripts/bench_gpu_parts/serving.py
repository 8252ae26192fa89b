"""One run through the three processes: latencies of requests that arrive at random, and the GPU's share of the time."""

import asyncio
import json
import random
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_report import random_prompt, summary

from bench_gpu_parts.workloads import Load, arrivals
from octavo import AsyncClient, SamplingParams

PROFILE_S = 0.5
"""Seconds of the trace in the middle of a run; a second is about ten megabytes."""


async def measure(model: Path, settings: dict[str, Any], load: Load, traces: Path | None) -> dict[str, Any]:
    """Return latencies and throughput of a load, after a small warm-up load.

    Args:
        model: directory of the model.
        settings: settings of the engine.
        load: the requests.
        traces: directory for the worker's trace, for `idle_share`; `None` to record no trace.
    """
    async with AsyncClient.launch(str(model), **settings) as client:
        await _run(client, Load(16, load.input_len, 8, 1e3, load.max_token_id, load.sampling), seed=1)
        started = time.perf_counter()
        streams = await _run(client, load, seed=2)
        elapsed_s = time.perf_counter() - started
        if traces is not None:
            # perf: in a separate run, because the profiler slows the worker down.
            await asyncio.gather(_run(client, load, seed=3), _record(client, traces, load))
    gaps = [later - earlier for times in streams for earlier, later in pairwise(times[1:])]
    found: dict[str, Any] = {
        "ttft_s": summary([times[1] - times[0] for times in streams]),
        "itl_s": summary(gaps),
        "output_tokens_per_s": load.num_requests * load.output_len / elapsed_s,
    }
    return found


async def _run(client: AsyncClient, load: Load, seed: int) -> list[list[float]]:
    """Return for each request the times at which it was sent and at which each of its outputs arrived."""
    rng = random.Random(seed)
    params = SamplingParams(
        max_tokens=load.output_len, ignore_eos=True, detokenize=False, stream_interval=1, **load.sampling
    )
    prompts = [random_prompt(rng, load.input_len, load.max_token_id) for _ in range(load.num_requests)]

    async def request(prompt: list[int], after_s: float) -> list[float]:
        await asyncio.sleep(after_s)
        times = [time.perf_counter()]
        num_tokens = 0
        async for output in client.generate({"prompt_token_ids": prompt}, params):
            times.append(time.perf_counter())
            num_tokens += len(output.outputs[0].token_ids)
        if num_tokens != load.output_len:
            raise RuntimeError(f"{num_tokens} tokens instead of {load.output_len}")
        return times

    waits = arrivals(load.num_requests, load.rate, rng)
    return await asyncio.gather(*map(request, prompts, waits))


async def _record(client: AsyncClient, traces: Path, load: Load) -> None:
    await asyncio.sleep(load.num_requests / load.rate / 2)
    await client.start_profile(str(traces))
    await asyncio.sleep(PROFILE_S)
    await client.stop_profile()


def idle_share(traces: Path) -> float:
    """Return the idle fraction of the time between the first and the last kernel of the only trace.

    Raises:
        ValueError: the trace has no kernels: the worker computed on a CPU, or the profiler saw no GPU.
    """
    (trace,) = traces.glob("*.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    if not spans:
        raise ValueError(f"{trace.name} has no kernels")
    return 1 - _covered(spans) / (max(end for _, end in spans) - spans[0][0])


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals that are sorted by their start."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
