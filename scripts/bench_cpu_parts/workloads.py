"""What the engines are asked to generate, as token ids: one function for each of the issue's workloads.

Lengths are the same in every run. Tokens are new in each run, so that no prefix cache helps where none should.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from bench_report import random_prompt

_LENGTHS_SEED = 64


@dataclass(frozen=True)
class Workload:
    """Requests that are sent together."""

    prompts: list[list[int]]
    max_tokens: list[int]
    shared_prefix_len: int = 0
    """Number of tokens that all prompts share at the beginning."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens of all requests together."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all requests together."""
        return sum(self.max_tokens)


MakeWorkloads = Callable[[random.Random], list[Workload]]
"""Returns the workloads of one run, which are run one after another."""


def one_stream(rng: random.Random) -> list[Workload]:
    """One request with 32 tokens in and 256 out."""
    return [Workload([random_prompt(rng, 32)], [256])]


def mixed_batch(rng: random.Random) -> list[Workload]:
    """64 concurrent requests, 16 to 256 tokens in, 16 to 128 out."""
    return [_mixed(rng, 64)]


def mixed_batch_32(rng: random.Random) -> list[Workload]:
    """32 concurrent requests of the same range of lengths."""
    return [_mixed(rng, 32)]


def _mixed(rng: random.Random, batch: int) -> Workload:
    lengths = random.Random(_LENGTHS_SEED)
    prompts = [random_prompt(rng, lengths.randint(16, 256)) for _ in range(batch)]
    return Workload(prompts, [lengths.randint(16, 128) for _ in prompts])


def long_prompts(rng: random.Random) -> list[Workload]:
    """Prompts of 2,048 tokens one after another, one token out."""
    return [Workload([random_prompt(rng, 2048)], [1]) for _ in range(3)]


def shared_prefix(rng: random.Random) -> list[Workload]:
    """64 requests with the same first 512 tokens and 16 of their own, 32 out."""
    prefix = random_prompt(rng, 512)
    return [Workload([prefix + random_prompt(rng, 16) for _ in range(64)], [32] * 64, len(prefix))]


def batch_of(batch: int, context: int, max_tokens: int) -> MakeWorkloads:
    """Return a function that makes `batch` prompts of `context` tokens, once for one token and once for all of them."""

    def make(rng: random.Random) -> list[Workload]:
        return [
            Workload([random_prompt(rng, context) for _ in range(batch)], [count] * batch) for count in (1, max_tokens)
        ]

    return make
