"""Combinations of parameters in which every pair of values occurs, instead of the complete product."""

import heapq
import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

LONG_IF_INTERPRETED = [pytest.mark.long] if os.environ.get("TRITON_INTERPRET") == "1" else []
"""Marks for parameters of kernels that are slow in Triton's interpreter and covered by another parameter there."""


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value per parameter such that every two values of two parameters meet at least once.

    Greedy and deterministic: a few more combinations than the largest two parameters multiplied.
    """
    candidates = list(itertools.product(*(range(len(values)) for values in parameters)))
    pairs = {candidate: _pairs(candidate) for candidate in candidates}
    uncovered = set().union(*pairs.values())
    # Most new pairs first; on ties, the first candidate. A candidate never gains pairs, so an old count is an upper
    # bound.
    queue = [(-len(pairs[candidate]), candidate) for candidate in candidates]
    heapq.heapify(queue)
    chosen = []
    while uncovered:
        count, best = heapq.heappop(queue)
        found = len(uncovered & pairs[best])
        if found < -count:
            heapq.heappush(queue, (-found, best))
            continue
        uncovered -= pairs[best]
        chosen.append(tuple(values[index] for values, index in zip(parameters, best, strict=True)))
    return chosen


def pairwise_first(*parameters: Sequence[Any]) -> list[Any]:
    """Return the same combinations, then all others of the product, which only `--long` runs."""
    chosen = pairwise(*parameters)
    others = [values for values in itertools.product(*parameters) if values not in chosen]
    return [*chosen, *(pytest.param(*values, marks=pytest.mark.long) for values in others)]


def pairwise_of_levels(levels: Sequence[str], heads: Sequence[Any], *parameters: Sequence[Any]) -> list[Any]:
    """Return `pairwise_first` of all parameters, but replace `heads` by its last value at the level "portable".

    That library is hardly optimized in the default run, where larger heads take ten seconds. They run with `--long`.
    """
    chosen = [
        (level, heads[-1] if level == "portable" else of_level, *others)
        for level, of_level, *others in pairwise(levels, heads, *parameters)
    ]
    short = list(dict.fromkeys(chosen))
    left = [values for values in itertools.product(levels, heads, *parameters) if values not in short]
    return [*short, *(pytest.param(*values, marks=pytest.mark.long) for values in left)]


def short_first(values: Sequence[Any], num_short: int) -> list[Any]:
    """Return the first values, then all others, which only `--long` runs."""
    return [*values[:num_short], *(pytest.param(value, marks=pytest.mark.long) for value in values[num_short:])]


def _pairs(candidate: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(candidate), 2))
