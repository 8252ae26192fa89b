"""Random requests and their results bit for bit: the oracle of the determinism tests."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from octavo.frontend.client import AsyncClient
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.protocol.params import OutputKind, SamplingParams
from octavo.protocol.structured import StructuredOutputsParams


@dataclass(frozen=True)
class Ask:
    """One request of a workload."""

    prompt: tuple[int, ...]
    params: SamplingParams
    delay_s: float = 0.0

    def __hash__(self) -> int:
        return hash(self.prompt)


def bits(value: float | None) -> bytes | None:
    """The exact bits of a number."""
    return None if value is None else struct.pack("<d", value)


def logprob_bits(positions: "Sequence[PositionLogprobs | None] | None") -> list[Any] | None:
    """The exact bits of logprobs, in order."""
    if positions is None:
        return None
    return [
        position and [(token_id, bits(entry.logprob), entry.rank) for token_id, entry in position.items()]
        for position in positions
    ]


def fingerprint(output: RequestOutput) -> list[Any]:
    """Everything that must not depend on other requests."""

    def one(sequence: CompletionOutput) -> tuple[Any, ...]:
        return (
            sequence.token_ids,
            sequence.text,
            sequence.finish_reason,
            sequence.stop_reason,
            bits(sequence.cumulative_logprob),
            logprob_bits(sequence.logprobs),
        )

    return [[one(sequence) for sequence in output.outputs], logprob_bits(output.prompt_logprobs)]


async def ask(client: AsyncClient, request: Ask) -> list[Any]:
    """Send one request and return its fingerprint."""
    await asyncio.sleep(request.delay_s)
    params = request.params.clone(output_kind=OutputKind.FINAL_ONLY)
    outputs: AsyncIterator[RequestOutput] = client.generate(list(request.prompt), params)
    final = [output async for output in outputs]
    assert len(final) == 1, "a request must end in exactly one result"
    assert final[0].finished
    return fingerprint(final[0])


async def ask_all(client: AsyncClient, requests: Sequence[Ask]) -> list[list[Any]]:
    """Send all requests concurrently, after their delays."""
    return list(await asyncio.gather(*(ask(client, request) for request in requests)))


async def ask_one_by_one(client: AsyncClient, requests: Sequence[Ask]) -> list[list[Any]]:
    """Send one request after another, so that each runs alone."""
    return [await ask(client, request) for request in requests]


FORMS = [
    StructuredOutputsParams(choice=["yes", "no", "caf\u00e9 \U0001f600"]),
    StructuredOutputsParams(regex="[ab]{2,9}(c|d+)?"),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}}, whitespace_pattern=" ?"),
    StructuredOutputsParams(grammar='start: "x" start "y" | "z"', start_after="e"),
]
"""Forms of outputs: of few texts and of many, some of which end where they must and some where they may."""


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Draw parameters; every field that reaches the sampler is used by some of them."""
    is_greedy = rng.random() < 0.3
    return SamplingParams(
        temperature=0.0 if is_greedy else rng.choice([0.5, 0.8, 1.0, 1.7]),
        n=1 if is_greedy or rng.random() < 0.8 else rng.choice([2, 3]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        seed=rng.randrange(2**63),
        max_tokens=rng.choice([rng.randrange(1, 25), rng.randrange(25, 80)]),
        min_tokens=rng.choice([0, 0, 1]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        logit_bias=rng.choice([None, None, {rng.randrange(vocab_size): 3.5}]),
        structured_outputs=rng.choice([None, None, None, *FORMS]),
    )


def random_requests(seed: int, count: int, vocab_size: int, *, max_prompt: int = 90) -> list[Ask]:
    """Draw a workload: shared prefixes, odd lengths, mixed parameters, arrivals in bursts."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(vocab_size) for _ in range(rng.choice([16, 33, 48]))) for _ in range(3)]
    requests = []
    for _ in range(count):
        own = tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(1, max_prompt - 48)))
        prompt = rng.choice([(), (), *prefixes]) + own
        requests.append(Ask(prompt, random_params(rng, vocab_size), rng.choice([0.0, 0.0, 0.05, 0.2])))
    return requests


def workloads(vocab_size: int, max_size: int = 12) -> st.SearchStrategy[list[Ask]]:
    """Hypothesis strategy for small workloads."""
    return st.builds(
        lambda seed, count: random_requests(seed, count, vocab_size),
        st.integers(0, 2**32),
        st.integers(1, max_size),
    )
