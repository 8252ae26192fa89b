"""LoRA adapters of expert layers for tests, and their effect: weights with the adapters merged into them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from kernel_checks import random
from torch import Tensor

from octavo.kernels.experts import ExpertAdapters, cases, reference
from octavo.kernels.experts.cases import Layer
from octavo.kernels.lora import LoraSlots
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.lora.shape import LoraPart, LoraShape
from octavo.kernels.routing import route

NUM_TOKENS, NUM_SLOTS, MAX_RANK = 150, 3, 24
RANKS = (8, 24, 3)
"""Ranks of the adapters; some of their experts and parts have no adapter."""
LAYERS = {name: cases.CASES[name] for name in ("small", "biases", "no gates", "one expert")}


def random_part(rank: int, inputs: int, outputs: int, seed: int) -> LoraPart:
    return LoraPart(random(rank, inputs, seed=seed) * inputs**-0.5, random(outputs, rank, seed=seed + 1), 0.5)


def adapter_of(slot: int, layer: Layer) -> tuple[list[LoraPart | None], list[LoraPart | None]]:
    """Return the adapter's parts for gates and ups, and for downs."""
    gates_and_ups: list[LoraPart | None] = []
    downs: list[LoraPart | None] = []
    num_parts = 1 if layer.activation == "relu2" else 2
    for expert in range(layer.num_experts):
        for index in range(num_parts):
            seed = 1000 * slot + 10 * expert + 2 * index
            part = random_part(RANKS[slot], layer.width, layer.intermediate, seed)
            gates_and_ups.append(None if (slot, index, expert % 3) == (1, 0, 1) else part)
        part = random_part(RANKS[slot], layer.intermediate, layer.width, 1000 * slot + 10 * expert + 4)
        downs.append(None if slot == 2 else part)
    return gates_and_ups, downs


def new_adapters(layer: Layer, dtype: torch.dtype, own: range, new: Callable[[LoraShape], LoraSlots]) -> ExpertAdapters:
    """Return filled slots for the experts `own`."""
    num_parts = 1 if layer.activation == "relu2" else 2
    sizes = [(layer.width, (layer.intermediate,) * num_parts), (layer.intermediate, (layer.width,))]
    slots = [new(LoraShape(inputs, parts, NUM_SLOTS, MAX_RANK, dtype, num_experts=len(own))) for inputs, parts in sizes]
    for slot in range(NUM_SLOTS):
        for target, parts in zip(slots, adapter_of(slot, layer), strict=True):
            count = len(target.shape.parts)
            target.put(slot, parts[own.start * count : own.stop * count])
    return ExpertAdapters(slots[0], slots[1], AdapterRows(NUM_SLOTS))


def merged(layer: Layer, weights: dict[str, Tensor], slot: int) -> dict[str, Tensor]:
    """Return the weights with an adapter merged into them."""
    result = {name: tensor.clone() for name, tensor in weights.items()}
    gates_and_ups, downs = adapter_of(slot, layer)
    names = ["up_EID"] if layer.activation == "relu2" else ["gate_EID", "up_EID"]
    for expert in range(layer.num_experts):
        own = gates_and_ups[expert * len(names) : (expert + 1) * len(names)]
        for name, part in zip([*names, "down_EDI"], [*own, downs[expert]], strict=True):
            if part is not None:
                result[name][expert] += part.scale * part.b_OR @ part.a_RI
    return result


def expected_output(
    layer: Layer,
    weights: dict[str, Tensor],
    x: Tensor,
    logits: Tensor,
    slots: npt.NDArray[np.int64],
) -> Tensor:
    routing, out = route(logits, layer.rule), torch.empty(len(x), layer.width)
    for slot in range(-1, NUM_SLOTS):
        rows = torch.from_numpy(slots == slot)
        own = weights if slot < 0 else merged(layer, weights, slot)
        out[rows] = reference.experts(
            x[rows], routing.expert_TK[rows], routing.weight_TK[rows], activation=layer.activation, **own
        )
    return out


def inputs_of(layer: Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor, npt.NDArray[np.int64]]:
    x, logits = random(NUM_TOKENS, layer.width, dtype=dtype, seed=1), random(NUM_TOKENS, layer.num_experts, seed=2)
    return x, logits, np.random.default_rng(0).integers(-1, NUM_SLOTS, NUM_TOKENS)
