"""Requests for the test of `sample`, of all kinds."""

import itertools
from dataclasses import dataclass, field

LARGEST = 1e30


@dataclass(frozen=True)
class Request:
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
    """Tokens of prompt and output, and how often each was output."""
    penalties: dict[str, float] = field(default_factory=lambda: {"repetition": 1.3, "frequency": 0.4, "presence": -0.7})
    bad: list[int] = field(default_factory=list)
    """Tokens that would complete a bad word."""
    allowed: list[int] | None = None
    largest: float = LARGEST


CHANGES: list[Request] = [
    Request(),
    Request(bias={0: 5.0, 6: -3.5}),
    Request(withheld=[1, 5], min_tokens=3),
    Request(seen={0: 0, 3: 2, 5: 1}),
    Request(bias={2: 1e38}, withheld=[2, 4], min_tokens=9, seen={2: 4, 6: 0}),
    Request(bad=[0, 1, 4, 6]),
    Request(allowed=[6]),
    Request(allowed=[0, 3, 5], bad=[3], bias={4: 1e38}, withheld=[0], min_tokens=9, seen={5: 2}),
    Request(allowed=[2], bad=[2], bias={3: 40.0}),
]
DRAWS: list[dict[str, float | int]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5, "seed": 3},
    {"temperature": 1.5, "min_p": 0.1, "seed": 2**64 - 1},
    {"temperature": 0.9, "top_p": 0.83, "seed": 5},
    {"temperature": 0.01, "top_k": 20, "top_p": 0.7, "min_p": 0.02, "seed": 8},
]

REQUESTS = [Request(**{**vars(change), **draw}) for change, draw in itertools.product(CHANGES, DRAWS)]
VOCAB_SIZES = [7, 64, 151, 2049]
