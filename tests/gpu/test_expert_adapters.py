"""Adapters of experts on a GPU: right, the same bits in any batch, and none for tokens without one."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from expert_adapters import LAYERS, expected_output, inputs_of, new_adapters
from expert_layers import pack_experts
from kernel_checks import assert_close
from pairwise import LONG_IF_INTERPRETED
from torch import Tensor

from octavo.kernels.experts import cases
from octavo.kernels.experts.gpu import experts
from octavo.kernels.linear import PackedLinear, gpu
from octavo.kernels.linear.quantization import quantize_weight
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.lora import gpu as lora_gpu
from octavo.kernels.routing import Routing
from octavo.kernels.routing import reference as routing_reference

NUM_TOKENS = 20


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    product = gpu.new_packer(is_batch_invariant=True).pack(weight, bias, is_grouped=True)
    return PackedLinear(weight.shape[1], weight.shape[0], weight.dtype, weight.device, product)


def quantized(weight: Tensor) -> QuantizedWeight:
    """Return 8-bit floats for rows of 16 bits."""
    return replace(quantize_weight(None, weight, "fp8"), row_type=None)


def pack_quantized(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    product = gpu.Packer(is_batch_invariant=True).pack_quantized(
        quantized(weight.float().cpu()), bias, weight.dtype, weight.device
    )
    assert product is not None
    return PackedLinear(weight.shape[1], weight.shape[0], weight.dtype, weight.device, product)


@pytest.mark.parametrize(
    ("name", "dtype", "own", "is_quantized"),
    [
        ("small", torch.float32, None, False),
        pytest.param("biases", torch.bfloat16, None, False, marks=LONG_IF_INTERPRETED),
        ("no gates", torch.float32, range(1, 3), False),
        ("biases", torch.bfloat16, None, True),
        pytest.param("no gates", torch.bfloat16, None, True, marks=LONG_IF_INTERPRETED),
    ],
)
def test_adapters(name: str, dtype: torch.dtype, own: range | None, is_quantized: bool, device: torch.device) -> None:
    layer = LAYERS[name]
    weights = {key: tensor.to(dtype).float() for key, tensor in cases.weights(layer).items()}
    if is_quantized:
        for key in ("gate_EID", "up_EID", "down_EDI"):
            if key in weights:
                weights[key] = torch.stack([quantized(weight).dequantize() for weight in weights[key]])
    x, logits, slots = (values[:NUM_TOKENS] for values in inputs_of(layer, dtype))
    on_device = {key: tensor.to(device) for key, tensor in weights.items()}
    packed = pack_experts(layer, on_device, pack_quantized if is_quantized else pack, dtype, own)
    adapters = new_adapters(layer, dtype, packed.own, partial(lora_gpu.new_slots, device=device))

    def compute(rows: Tensor, *, has_adapters: bool = True) -> Tensor:
        chosen, factors = routing_reference.route(logits[rows], layer.rule, None)
        adapters.rows.slots_T = torch.from_numpy(slots[rows.numpy()]).to(device)
        routing = Routing(chosen.to(device), factors.to(device))
        return experts(x[rows].to(device), routing, packed, None, adapters if has_adapters else None).cpu()

    everything = torch.arange(NUM_TOKENS)
    whole, base = compute(everything), compute(everything, has_adapters=False)
    is_base = torch.from_numpy(slots < 0)
    assert torch.equal(whole[is_base], base[is_base]) and not torch.equal(whole, base)
    shuffled = torch.from_numpy(np.random.default_rng(1).permutation(NUM_TOKENS))
    for rows in (shuffled, shuffled[:3]):
        assert torch.equal(compute(rows), whole[rows])
    if own is None:
        assert_close(whole.float(), expected_output(layer, weights, x, logits, slots), 2 * cases.TOLERANCES[dtype])
    for target in (adapters.gates_and_ups, adapters.downs):
        target.clear(1)
    assert torch.equal(compute(everything)[slots == 1], base[slots == 1])
