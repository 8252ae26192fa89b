"""Requests for the test of `sample`: every two values of two parameters occur together in one of them."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LARGEST = 1e30


@dataclass(frozen=True)
class SamplingCase:
    """The parameters of a request as numbers; see `SampledRequest`."""

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    withheld: list[int] = field(default_factory=list)
    min_tokens: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    """Tokens of prompt and output, with the number of times each was output."""
    penalties: dict[str, float] = field(default_factory=lambda: {"repetition": 1.3, "frequency": 0.4, "presence": -0.7})
    bad: list[int] = field(default_factory=list)
    """Tokens that would complete a bad word."""
    allowed: list[int] | None = None
    first_timestamp: int = 0
    """Text before this token is ruled out if a timestamp is likelier; 0: never. Not on GPUs."""
    largest: float = LARGEST
    spread: float = 1.0
    """Standard deviation of the logits."""
    num_outputs: int = 0
    """Outputs before the token that is drawn."""


OPTIONS: dict[str, Sequence[Any]] = {
    "temperature": [0.0, 0.01, 0.6, 1.0, 1.5],
    "seed": [0, 3, 2**64 - 1],
    "top_k": [0, 1, 5, 1000],
    "top_p": [1.0, 0.7, 0.05],
    "min_p": [0.0, 0.1, 1.0],
    "bias": [{}, {0: 5.0, 6: -3.5}, {2: 1e38}],
    "withheld": [[], [1, 5]],
    "min_tokens": [0, 3],
    "seen": [{}, {0: 0, 3: 2, 5: 1}],
    "penalties": [
        {"repetition": 1.3, "frequency": 0.4, "presence": -0.7},
        {"repetition": 1e-30, "frequency": 0.0, "presence": 0.0},
    ],
    "bad": [[], [0, 1, 4, 6]],
    "allowed": [None, [6], [0, 3, 5]],
    "spread": [0.3, 4.0],
    "num_outputs": [0, 2, 3],
}
"""Values of each parameter; a new parameter gets a line here. Token ids are below 7."""

VOCAB_SIZES = [7, 151, 2049]


def pairwise_requests(options: Mapping[str, Sequence[Any]]) -> list[SamplingCase]:
    """Return a small number of requests in which every two values of different options occur together."""
    generator = random.Random(0)
    names = list(options)
    counts = [len(values) for values in options.values()]
    uncovered = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i, j in itertools.product(range(counts[a]), range(counts[b]))
    }
    requests = []
    while uncovered:
        (a, i), (b, j) = min(uncovered)
        candidates = []
        for _ in range(30):
            chosen = [generator.randrange(count) for count in counts]
            chosen[a], chosen[b] = i, j
            candidates.append(chosen)
        pairs = [set(itertools.combinations(enumerate(chosen), 2)) for chosen in candidates]
        best = max(range(len(candidates)), key=lambda index: len(pairs[index] & uncovered))
        uncovered -= pairs[best]
        requests.append(
            SamplingCase(**{name: options[name][k] for name, k in zip(names, candidates[best], strict=True)})
        )
    return requests


REQUESTS = pairwise_requests(OPTIONS)

SPEECH_OPTIONS = {
    **{name: OPTIONS[name] for name in ("temperature", "top_k", "bias", "bad", "allowed", "spread")},
    "first_timestamp": [0, 1, 4, 6],
}
SPEECH_REQUESTS = pairwise_requests(SPEECH_OPTIONS)
"""Requests of models that transcribe speech; not on GPUs."""
