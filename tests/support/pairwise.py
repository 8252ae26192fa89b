"""`pairwise`: combinations of parameters in which every pair of values occurs, instead of their whole product."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value per parameter such that every two values of two parameters meet at least once.

    Greedy and deterministic: a few more combinations than the largest two parameters multiplied.
    """
    candidates = list(itertools.product(*(range(len(values)) for values in parameters)))
    uncovered = set().union(*map(_pairs, candidates))
    chosen = []
    while uncovered:
        best = max(candidates, key=lambda candidate: len(uncovered & _pairs(candidate)))
        uncovered -= _pairs(best)
        chosen.append(tuple(values[index] for values, index in zip(parameters, best, strict=True)))
    return chosen


def _pairs(candidate: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(candidate), 2))
