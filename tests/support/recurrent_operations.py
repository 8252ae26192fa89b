"""Runs an operation with states over sequences, in one piece or in the chunks of random batches."""

import random as python_random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from native_checks import beside_others
from torch import Tensor

from octavo.kernels.native.arguments import Arguments, GroupArguments, Matrix, StepArguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.recurrence import RecordedSlots, StateArguments, StateSlots

Compute = Callable[[Sequence[Tensor], Tensor, StateSlots], Tensor]
"""From the rows of a step, all states and the requests' slots to the outputs."""

LENGTHS = (1, 7, 37, 18)
NUM_SLOTS = 2 * len(LENGTHS)


@dataclass(frozen=True, slots=True)
class Results:
    """Results of one sequence."""

    out: Tensor
    state: Tensor


def new_states(dims: Sequence[int]) -> Tensor:
    """Return states full of NaN, which lie apart."""
    size = torch.Size(dims).numel()
    return torch.full((NUM_SLOTS, size + 16), float("nan"))[:, :size].unflatten(1, tuple(dims))


def alone(compute: Compute, inputs: Sequence[Tensor], dims: Sequence[int]) -> Results:
    """Compute one sequence in one step."""
    states = new_states(dims)
    out = compute(inputs, states, StateSlots([0, len(inputs[0])], [-1], [1]))
    return Results(out, states[1].clone())


def in_batches(
    compute: Compute, sequences: Sequence[Sequence[Tensor]], dims: Sequence[int], seed: int
) -> list[Results]:
    """Compute all sequences in chunks of random sizes, several in one step; states stay in place or move."""
    choices, states = python_random.Random(seed), new_states(dims)
    done, sources = [0] * len(sequences), [-1] * len(sequences)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    while live := [index for index, inputs in enumerate(sequences) if done[index] < len(inputs[0])]:
        batch = choices.sample(live, choices.randint(1, len(live)))
        counts = [choices.randint(1, min(20, len(sequences[index][0]) - done[index])) for index in batch]
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        # Each sequence has two slots.
        destinations = [2 * index + choices.randint(0, 1) for index in batch]
        rows = [
            torch.cat([part[done[i] : done[i] + count] for i, count, part in zip(batch, counts, parts, strict=True)])
            for parts in zip(*(sequences[index] for index in batch), strict=True)
        ]
        out = compute(rows, states, StateSlots(starts, [sources[index] for index in batch], destinations))
        for index, count, destination, part in zip(batch, counts, destinations, out.split(counts), strict=True):
            outputs[index].append(part)
            done[index] += count
            sources[index] = destination
    return [Results(torch.cat(parts), states[slot].clone()) for parts, slot in zip(outputs, sources, strict=True)]


def native_compute(
    library: NativeLibrary,
    name: str,
    arguments: Callable[[Sequence[Matrix], Matrix, StateArguments], Arguments],
    out_width: int,
    *,
    num_threads: int,
    dtype: torch.dtype = torch.float32,
) -> Compute:
    """Return the computation in C++; `arguments` makes its arguments."""

    def compute(inputs: Sequence[Tensor], states: Tensor, slots: StateSlots) -> Tensor:
        rows = [beside_others(part) for part in inputs]
        out = torch.full((len(rows[0]), out_width), 7.0, dtype=dtype)
        query_starts = torch.tensor(slots.query_starts)
        sources, destinations = (torch.tensor(part, dtype=torch.int32) for part in (slots.sources, slots.destinations))
        group = GroupArguments(state_sources=sources.data_ptr(), state_destinations=destinations.data_ptr())
        groups = (GroupArguments * 2)(GroupArguments(), group)
        step = StepArguments(
            num_rows=len(out), num_requests=len(sources), query_starts=query_starts.data_ptr(), groups=groups
        )
        state = StateArguments.of(states, RecordedSlots(cache_group=1))
        call = arguments([Matrix.of(part) for part in rows], Matrix.of(out), state)
        run(library, name, call, step=step, num_threads=num_threads)
        return out

    return compute
