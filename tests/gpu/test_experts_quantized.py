"""Mixtures of experts with quantized weights on a GPU: their definition, and the same bits for a token in any batch."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import assert_close, random
from quantized_weights import FORMATS, ROW_FORMATS, weight_of
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.experts import PackedExperts, reference
from octavo.kernels.experts import gpu as experts_gpu
from octavo.kernels.experts.cases import Layer
from octavo.kernels.linear import PackedLinear, gpu
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.routing import NO_EXPERT, Routing
from octavo.kernels.routing import reference as routing_reference

LAYERS = {
    "gated": Layer(5, 2, 144, 136),
    "biases": Layer(4, 2, 128, 48, "clamped_swiglu", has_bias=True),
    "no gates": Layer(4, 2, 128, 160, "relu2"),
}
"""Neither whole blocks nor whole tiles."""
CASES = [
    ("gated", "int4 of groups"),
    ("biases", "mxfp4"),
    ("no gates", "awq"),
    ("gated", "int4 of outputs"),
    ("gated", "Q4_K"),
    ("gated", "Q8_0"),
    ("gated", "gptq of 8 bits"),
    ("biases", "fp8 of outputs"),
    ("no gates", "fp8 of blocks"),
]
ROW_CASES = [("gated", "w8a8"), ("gated", "fp8, static"), ("no gates", "fp8"), ("biases", "fp8 of blocks")]
TOLERANCE = 1.5e-2


class Weights:
    """The quantized weights of a layer: random ones of the size of real ones."""

    def __init__(self, layer: Layer, name: str, seed: int, *, has_rows: bool = False) -> None:
        options, row_type = (*ROW_FORMATS[name][:2],) if has_rows else (FORMATS[name][0], None)
        row_scale = 0.04 if row_type is not None and row_type.endswith("tensor") else None
        self.layer = layer

        def weights(part: int, *shape: int) -> list[QuantizedWeight]:
            found = []
            for expert in range(layer.num_experts):
                weight = weight_of(100 * seed + 10 * part + expert, **options, shape=shape)
                factor = shape[1] ** -0.5 / weight.dequantize().std()
                scale_OG = (weight.scale_OG.float() * factor).to(weight.scale_OG.dtype)
                minimum_OG = None if weight.minimum_OG is None else (weight.minimum_OG * factor).to(scale_OG.dtype)
                scaled = replace(weight, scale_OG=scale_OG, minimum_OG=minimum_OG)
                found.append(replace(scaled, row_type=row_type, row_scale=row_scale))
            return found

        has_gates = layer.activation != "relu2"
        self.gates = weights(1, layer.intermediate, layer.width) if has_gates else []
        self.ups = weights(2, layer.intermediate, layer.width)
        self.downs = weights(3, layer.width, layer.intermediate)
        shape = layer.num_experts, layer.intermediate
        self.gate_bias_EI = random(*shape, dtype=torch.bfloat16, seed=seed + 1) if layer.has_bias else None
        self.up_bias_EI = random(*shape, dtype=torch.bfloat16, seed=seed + 2) if layer.has_bias else None
        self.down_bias_ED = (
            random(layer.num_experts, layer.width, dtype=torch.bfloat16, seed=seed + 3) if layer.has_bias else None
        )

    def packed(self, device: torch.device, *, has_dense_downs: bool = False) -> PackedExperts:
        packer = gpu.Packer(is_batch_invariant=True)

        def pack(weights: list[QuantizedWeight], bias_EO: Tensor | None = None) -> list[PackedLinear]:
            found = []
            for expert, weight in enumerate(weights):
                bias_O = None if bias_EO is None else bias_EO[expert].contiguous()
                product = packer.pack_quantized(weight, bias_O, torch.bfloat16, device)
                assert product is not None
                found.append(PackedLinear(weight.num_inputs, weight.num_outputs, torch.bfloat16, device, product))
            return found

        def dense(weight: QuantizedWeight) -> PackedLinear:
            values = weight.dequantize().to(device=device, dtype=torch.bfloat16)
            product = packer.pack(values, None, is_grouped=True)
            return PackedLinear(weight.num_inputs, weight.num_outputs, values.dtype, device, product)

        return PackedExperts(
            self.layer.num_experts,
            pack(self.gates, self.gate_bias_EI),
            pack(self.ups, self.up_bias_EI),
            [dense(weight) for weight in self.downs] if has_dense_downs else pack(self.downs),
            self.layer.activation,
            None if self.down_bias_ED is None else self.down_bias_ED.to(device),
        )

    def expected(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Return the definition, with the numbers that the levels mean."""
        gate_EID, up_EID, down_EDI = (
            torch.stack([weight.dequantize() for weight in weights]) if weights else None
            for weights in (self.gates, self.ups, self.downs)
        )
        assert up_EID is not None and down_EDI is not None
        return reference.experts(
            x_TD,
            routing.expert_TK,
            routing.weight_TK,
            up_EID,
            down_EDI,
            gate_EID,
            self.layer.activation,
            self.gate_bias_EI,
            self.up_bias_EI,
            self.down_bias_ED,
        )


def routing_of(layer: Layer, num_tokens: int, seed: int) -> Routing:
    logits = random(num_tokens, layer.num_experts, seed=seed)
    return Routing(*routing_reference.route(logits, layer.rule, None))


def compute(x: Tensor, routing: Routing, packed: PackedExperts, device: torch.device) -> Tensor:
    on_device = Routing(routing.expert_TK.to(device), routing.weight_TK.to(device))
    return experts_gpu.experts(x.to(device), on_device, packed, None).cpu()


@pytest.mark.parametrize(
    ("layer_name", "name", "has_rows"),
    [(*case, False) for case in CASES] + [(*case, True) for case in ROW_CASES],
    ids=str,
)
def test_experts(device: torch.device, seed: int, layer_name: str, name: str, has_rows: bool) -> None:
    layer = LAYERS[layer_name]
    weights = Weights(layer, name, seed, has_rows=has_rows)
    packed = weights.packed(device)
    kind = ROW_FORMATS[name][2] if has_rows else FORMATS[name][1]
    assert experts_gpu._weights(packed).downs.form.kind == kind  # type: ignore[union-attr]
    x = random(7, layer.width, dtype=torch.bfloat16, seed=seed)
    routing = routing_of(layer, 7, seed + 1)
    found = compute(x, routing, packed, device).float()
    # Rows of 8 bits are rounded twice, float8 by 2^-4 of each number.
    assert_close(found, weights.expected(x, routing), (4 if kind == "s8" else 8 if has_rows else 1) * TOLERANCE)


@pytest.mark.parametrize(
    ("name", "has_rows"), [("awq", False), pytest.param("fp8 of blocks", True, marks=pytest.mark.long)]
)
def test_a_token_has_the_same_bits_in_any_batch(device: torch.device, seed: int, name: str, has_rows: bool) -> None:
    """In tiles of all sizes, and at any place in them."""
    layer = Layer(2, 1, 144, 48)
    packed = Weights(layer, name, seed, has_rows=has_rows).packed(device)
    x = random(160, layer.width, dtype=torch.bfloat16, seed=seed)
    routing = routing_of(layer, 160, seed + 1)

    def layer_of(tokens: Tensor) -> Tensor:
        some = Routing(routing.expert_TK[tokens], routing.weight_TK[tokens])
        return compute(x[tokens], some, packed, device)

    tokens = torch.arange(160)
    whole = layer_of(tokens)
    shuffled = torch.randperm(160, generator=torch.Generator().manual_seed(seed))
    parts = (tokens[:1], tokens[149:], shuffled[:20], shuffled[:50], shuffled[:90])
    products = [each for each in experts_gpu._weights(packed)[1:] if each is not None]
    rows = {experts_gpu._tile_rows(experts_gpu._weights(packed), len(part), 2, 2) for part in (*parts, tokens)}
    assert rows == set(products[0].first.row_sizes), "all tiles"
    for some in parts:
        assert torch.equal(layer_of(some), whole[some]), len(some)


def test_weights_of_experts_without_tokens_are_not_read(device: torch.device, seed: int) -> None:
    layer = Layer(4, 2, 128, 48)
    weights = Weights(layer, "awq", seed)
    x = random(3, layer.width, dtype=torch.bfloat16, seed=seed)
    routing = Routing(torch.tensor([[0, 2], [0, 2], [NO_EXPERT] * 2], dtype=torch.int32), torch.full((3, 2), 0.5))
    routing.weight_TK[2] = torch.nan
    out = compute(x, routing, weights.packed(device), device)
    unread = weights.packed(device)
    for each in experts_gpu._weights(unread)[1:]:
        for table in each.table:
            table[[1, 3]] = 0  # addresses that nobody may read
    again = compute(x, routing, unread, device)
    assert torch.equal(again[:2], out[:2])
    assert again[2].isnan().all()


def test_gates_and_ups_may_be_quantized_where_downs_are_not(device: torch.device, seed: int) -> None:
    layer = LAYERS["gated"]
    weights = Weights(layer, "awq", seed)
    x, routing = random(7, layer.width, dtype=torch.bfloat16, seed=seed), routing_of(layer, 7, seed + 1)
    found = compute(x, routing, weights.packed(device, has_dense_downs=True), device)
    assert_close(found.float(), weights.expected(x, routing), TOLERANCE)


def test_experts_of_different_forms_are_refused(device: torch.device, seed: int) -> None:
    layer = LAYERS["gated"]
    packed, other = (Weights(layer, name, seed).packed(device) for name in ("awq", "Q8_0"))
    x, routing = random(1, layer.width, dtype=torch.bfloat16, seed=seed), routing_of(layer, 1, seed)
    ups = [other.ups[0], *packed.ups[1:]]
    with pytest.raises(ShapeError, match=r"different forms.*--quantization none"):
        compute(x, routing, replace(packed, ups=ups), device)
    found = compute(x, routing, replace(packed, ups=other.ups), device)
    assert found.isfinite().all(), "gates of one form and ups of another"
    rows = Weights(layer, "w8a8", seed, has_rows=True).packed(device)
    with pytest.raises(ShapeError, match="rows of different forms"):
        compute(x, routing, replace(packed, ups=rows.ups), device)
