"""End-to-end workloads as token ids: two for which others have published results."""

import random
from dataclasses import dataclass
from typing import Any

from bench_cpu_parts.workloads import Workload
from bench_report import random_prompt

NANO_VLLM_REQUESTS = 256
NANO_VLLM_LENGTHS = (100, 1024)
NANO_VLLM_MAX_TOKEN_ID = 10_000
NANO_VLLM_TEMPERATURE = 0.6


@dataclass(frozen=True)
class Load:
    """Requests of one length that arrive at random times."""

    num_requests: int
    input_len: int
    output_len: int
    rate: float
    """Requests per second."""
    max_token_id: int
    sampling: dict[str, Any]


def nano_vllm() -> Workload:
    """Return the requests of nano-vllm's benchmark: 142,827 tokens in and 133,966 out, with seed 0."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, NANO_VLLM_MAX_TOKEN_ID) for _ in range(rng.randint(*NANO_VLLM_LENGTHS))]
        for _ in range(NANO_VLLM_REQUESTS)
    ]
    return Workload(prompts, [rng.randint(*NANO_VLLM_LENGTHS) for _ in prompts])


def equal(num_requests: int, input_len: int, output_len: int) -> Workload:
    """Return requests of one length with different prompts."""
    rng = random.Random(0)
    return Workload([random_prompt(rng, input_len) for _ in range(num_requests)], [output_len] * num_requests)


def arrivals(num_requests: int, rate: float, rng: random.Random) -> list[float]:
    """Return the send times of requests in seconds: the first at 0, then at random, `rate` of them per second."""
    times = [0.0]
    for _ in range(num_requests - 1):
        times.append(times[-1] + rng.expovariate(rate))
    return times
