"""Adapters of experts: right, the same for a token in any batch, and nothing for tokens without one."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from expert_adapters import LAYERS, NUM_SLOTS, NUM_TOKENS, expected_output, inputs_of, new_adapters
from expert_layers import ExpertsProgram, pack_experts
from kernel_checks import assert_close
from torch import Tensor

from octavo.kernels.experts import cases, experts
from octavo.kernels.experts.cases import Layer
from octavo.kernels.linear import Packer
from octavo.kernels.lora import LoraSlots, new_slots
from octavo.kernels.lora.rows import GroupedRows
from octavo.kernels.lora.shape import LoraShape
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.routing import route

CPU = torch.device("cpu")


def slots_of(library: NativeLibrary | None) -> Callable[[LoraShape], LoraSlots]:
    return partial(new_slots, device=CPU, library=library)


@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_native_adapters(native_library: NativeLibrary, name: str, dtype: torch.dtype) -> None:
    layer = LAYERS[name]
    weights = {key: tensor.to(dtype).float() for key, tensor in cases.weights(layer).items()}
    x, logits, slots = inputs_of(layer, dtype)
    packed = pack_experts(layer, weights, Packer(CPU, native_library).pack, dtype)
    lora_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    adapters = new_adapters(layer, lora_dtype, packed.own, slots_of(native_library))
    program = ExpertsProgram(native_library, layer, packed, x, logits, adapters=adapters)
    alone = ExpertsProgram(native_library, layer, packed, x, logits)
    everything = list(range(NUM_TOKENS))
    whole = program.run(everything, 1, GroupedRows.of(slots, NUM_SLOTS))
    expected = x.float() + expected_output(layer, weights, x, logits, slots)
    assert_close(whole, expected, 2 * cases.TOLERANCES[dtype])
    base = alone.run(everything)
    assert torch.equal(program.run(everything), base)
    assert torch.equal(whole[slots < 0], base[slots < 0])
    assert not torch.equal(whole[slots == 2], base[slots == 2])
    shuffled = np.random.default_rng(1).permutation(NUM_TOKENS)
    for num_threads in (1, 2, 3):
        for tokens in ([0], [5, 5, 5], shuffled[:9].tolist(), shuffled.tolist()):
            grouped = GroupedRows.of(slots[tokens], NUM_SLOTS)
            assert torch.equal(program.run(tokens, num_threads, grouped), whole[tokens]), (len(tokens), num_threads)
    for target in (adapters.gates_and_ups, adapters.downs):
        target.clear(1)
    assert torch.equal(program.run(everything, 2, GroupedRows.of(slots, NUM_SLOTS))[slots == 1], base[slots == 1])


@pytest.mark.parametrize("lora_dtype", [torch.bfloat16, torch.float32])
def test_adapters_of_quantized_experts(native_library: NativeLibrary, lora_dtype: torch.dtype) -> None:
    """Products in 8 bits read other rows than adapters do."""
    layer = Layer(6, 2, 128, 96)
    weights = cases.weights(layer)
    x, logits, slots = inputs_of(layer, torch.bfloat16)
    packed = pack_experts(layer, weights, Packer(CPU, native_library, "int8").pack)
    adapters = new_adapters(layer, lora_dtype, packed.own, slots_of(native_library))
    program = ExpertsProgram(native_library, layer, packed, x, logits, adapters=adapters)
    assert ("cast_places" in program.operations) == (lora_dtype == torch.bfloat16)
    whole = program.run(list(range(NUM_TOKENS)), 2, GroupedRows.of(slots, NUM_SLOTS))
    assert_close(whole, x.float() + expected_output(layer, weights, x, logits, slots), 4e-2)


def test_ranks_that_divide_the_experts(native_library: NativeLibrary) -> None:
    """Each adds what its own experts get; the sum of their outputs has the bits of one rank."""
    layer = Layer(6, 2, 64, 96)
    weights = cases.weights(layer)
    x, logits, slots = inputs_of(layer, torch.float32)
    grouped, tokens = GroupedRows.of(slots, NUM_SLOTS), list(range(NUM_TOKENS))
    results = []
    for parts in ([range(6)], [range(2), range(2, 6)]):
        total = torch.zeros(NUM_TOKENS, layer.width)
        for own in parts:
            packed = pack_experts(layer, weights, Packer(CPU, native_library).pack, own=own)
            adapters = new_adapters(layer, torch.float32, own, slots_of(native_library))
            program = ExpertsProgram(native_library, layer, packed, x, logits, adapters=adapters)
            total += program.run(tokens, 2, grouped) - x
        results.append(total)
    assert_close(results[1], results[0], 1e-6)
    assert_close(results[0] + x, x + expected_output(layer, weights, x, logits, slots), 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_adapters_through_torch(name: str) -> None:
    layer = LAYERS[name]
    weights = cases.weights(layer)
    x, logits, slots = inputs_of(layer, torch.float32)
    packed = pack_experts(layer, weights, Packer(CPU).pack)
    adapters = new_adapters(layer, torch.float32, packed.own, slots_of(None))

    def compute(rows: Tensor) -> Tensor:
        adapters.rows.grouped = GroupedRows.of(slots[rows.numpy()], NUM_SLOTS)
        return experts(x[rows], route(logits[rows], layer.rule), packed, adapters=adapters)

    whole = compute(torch.arange(NUM_TOKENS))
    assert_close(whole, expected_output(layer, weights, x, logits, slots), 1e-5)
    for token in (0, 7, 40):
        assert torch.equal(compute(torch.tensor([token])), whole[token : token + 1])
