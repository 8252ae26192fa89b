"""The recurrence of a layer: its speed compared with the estimate, and whether chunks or the batch change its bits."""

from typing import Any

import torch
from bench_gpu_parts.recurrences import RECURRENCES, TINY, Recurrence, RecurrenceName
from bench_gpu_parts.timing import DEVICE, IS_ON_GPU, captured, normal, num_copies, release_memory, seconds_of
from gpu_state_estimates import estimate_recurrence
from torch import Tensor

from first_look_parts.figures import cell_result, figure
from octavo.kernels.causal_conv1d.gpu import causal_conv1d
from octavo.kernels.gated_delta_rule import DeltaWeights
from octavo.kernels.gated_delta_rule.gpu import gated_delta_rule
from octavo.kernels.recurrence import DeviceSlots
from octavo.kernels.selective_scan import ScanWeights
from octavo.kernels.selective_scan.gpu import selective_scan

LEAST_S = 0.05
"""Minimum time of one measurement in seconds."""


class Layer:
    """A convolution and a recurrence with random weights, and the states of a number of requests."""

    def __init__(self, name: RecurrenceName, num_states: int) -> None:
        self.sizes = sizes = _sizes(name)
        self._weight, self._bias = normal(sizes.channels, sizes.conv_width), normal(sizes.channels)
        self._numbers = [normal(sizes.num_heads).float() for _ in range(3)]
        self.conv_states = torch.zeros(num_states, sizes.conv_width - 1, sizes.channels, device=DEVICE)
        self.states = torch.zeros(num_states, sizes.num_heads, sizes.num_rows, sizes.num_columns, device=DEVICE)

    def run(self, rows: Tensor, factors: Tensor, slots: DeviceSlots) -> Tensor:
        """Return the outputs of all heads; `factors` has two numbers per head and token."""
        sizes = self.sizes
        mixed = causal_conv1d(rows, self._weight, self._bias, self.conv_states, slots, has_silu=True)
        num_values = sizes.num_heads * sizes.num_columns
        others = (sizes.channels - num_values) // 2
        a, b = factors.chunk(2, dim=1)
        if sizes.is_delta_rule:
            q, k, v = mixed.split([others, others, num_values], dim=1)
            return gated_delta_rule(q, k, v, b, a, DeltaWeights(*self._numbers[:2]), self.states, slots)
        x, b_rows, c_rows = mixed.split([num_values, others, others], dim=1)
        return selective_scan(x, b_rows, c_rows, a, ScanWeights(*self._numbers), self.states, slots)


@torch.inference_mode()
def recurrence(name: RecurrenceName, steps: list[list[int]]) -> dict[str, Any]:
    """Return the microseconds of steps with these numbers of requests and tokens, and requests whose bits differ."""
    differing = _differing(name, *(4, 67) if IS_ON_GPU else (2, 5))
    figures = []
    for num_requests, num_tokens in steps:
        key, title = f"state-{name}-{num_requests}-{num_tokens}", f"recurrence, {name}, {num_requests} x {num_tokens}"
        estimate = estimate_recurrence(_sizes(name), num_requests, num_tokens, "H200")
        figures.append(figure(key, title, "us", 1e6 * estimate.seconds, column="estimate"))
        spent_s = _seconds(name, num_requests, num_tokens)
        bound = [(estimate.num_bytes, 0.0)]
        figures.append(figure(key, title, "us", 1e6 * spent_s, seconds=spent_s, bound=bound))
        release_memory()
    title = f"recurrence, {name}: requests whose chunks or company change bits"
    figures.append(figure(f"bits-state-{name}", title, "", len(differing), digits=0))
    lines = [f"BITS DIFFER, recurrence of {name}: requests {differing}"] if differing else []
    return cell_result(figures, differing, lines)


def _sizes(name: RecurrenceName) -> Recurrence:
    return RECURRENCES[name] if IS_ON_GPU else TINY[RECURRENCES[name].is_delta_rule]


def _seconds(name: RecurrenceName, num_requests: int, num_tokens: int) -> float:
    copies = num_copies(num_requests * _sizes(name).state_bytes)
    layers = [Layer(name, num_requests) for _ in range(copies)]
    rows = normal(num_requests * num_tokens, _sizes(name).channels)
    factors = normal(len(rows), 2 * _sizes(name).num_heads)
    slots = _slots([num_tokens] * num_requests, range(num_requests))
    return seconds_of(captured(lambda copy: layers[copy].run(rows, factors, slots), copies), LEAST_S) / copies


def _differing(name: RecurrenceName, num_requests: int, num_tokens: int) -> list[int]:
    """Compute requests alone and unchunked, then together in chunks of several sizes; return those that differ."""
    layer = Layer(name, 2 * num_requests)
    rows, factors = normal(num_requests, num_tokens, layer.sizes.channels), normal(num_requests, num_tokens, 1)
    factors = factors.repeat(1, 1, 2 * layer.sizes.num_heads)
    alone = [
        layer.run(rows[index], factors[index], _slots([num_tokens], [index], is_new=True))
        for index in range(num_requests)
    ]
    parts: list[list[Tensor]] = [[] for _ in alone]
    places, done, size = range(num_requests, 2 * num_requests), 0, 1
    while done < num_tokens:
        size = min(2 * size, num_tokens - done)
        step = slice(done, done + size)
        slots = _slots([size] * num_requests, places, is_new=done == 0)
        out = layer.run(rows[:, step].flatten(0, 1), factors[:, step].flatten(0, 1), slots)
        for index, part in enumerate(out.split(size)):
            parts[index].append(part)
        done += size
    same_states = (layer.states[:num_requests] == layer.states[num_requests:]).flatten(1).all(dim=1).tolist()
    return [
        index
        for index, whole in enumerate(alone)
        if not (same_states[index] and torch.equal(torch.cat(parts[index]), whole))
    ]


def _slots(counts: list[int], places: "range | list[int]", *, is_new: bool = False) -> DeviceSlots:
    starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    destinations = torch.tensor(list(places), device=DEVICE)
    return DeviceSlots(starts, torch.full_like(destinations, -1) if is_new else destinations, destinations)
