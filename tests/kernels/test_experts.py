"""`experts`: right, and the same for a token in any batch and on any number of threads."""

import pytest
import torch
from expert_layers import ExpertsProgram, pack_experts
from kernel_checks import assert_close, assert_rows_independent, random
from rank_threads import on_ranks
from torch import Tensor

from octavo.kernels.all_reduce import native as all_reduce
from octavo.kernels.dispatch import ShapeError
from octavo.kernels.experts import ExpertExchange, PackedExperts, cases, experts, reference
from octavo.kernels.experts.cases import Layer
from octavo.kernels.experts.exchange import exchange_area_bytes
from octavo.kernels.linear import PackedLinear, Packer
from octavo.kernels.linear.packing import pack_coded, pack_plain
from octavo.kernels.linear.quantization import quantize_weight
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.rank_group import SharedMemoryGroup
from octavo.kernels.routing import Routing, route

CPU = torch.device("cpu")
NUM_TOKENS = 300
"""So many that an expert of "one expert" has more rows than fit into one block."""


def layer_inputs(layer: Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random(NUM_TOKENS, layer.width, dtype=dtype, seed=1), random(NUM_TOKENS, layer.num_experts, seed=2)


def expected_output(layer: Layer, weights: dict[str, Tensor], x: Tensor, logits: Tensor) -> Tensor:
    routing = route(logits, layer.rule)
    activation = layer.activation
    return reference.experts(x, routing.expert_TK, routing.weight_TK, activation=activation, **weights)


def assert_batch_invariant(program: ExpertsProgram, whole: Tensor) -> None:
    """Tokens alone, in other orders, beside others, and on other numbers of threads."""
    shuffled = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(3)).tolist()
    for num_threads in (1, 2, 3):
        for tokens in ([0], [5, 5, 5], shuffled[:9], shuffled[:100], shuffled):
            assert torch.equal(program.run(tokens, num_threads), whole[tokens]), (len(tokens), num_threads)


@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("name", cases.CASES)
def test_native_experts(native_library: NativeLibrary, name: str, dtype: torch.dtype) -> None:
    layer = cases.CASES[name]
    weights = {key: tensor.to(dtype) for key, tensor in cases.weights(layer).items()}
    x, logits = layer_inputs(layer, dtype)
    packed = pack_experts(layer, weights, Packer(CPU, native_library).pack, dtype)
    program = ExpertsProgram(native_library, layer, packed, x, logits)
    assert program.operations[-3:] == ["expert_product", "expert_product", "combine"], "the sum is a part of combine"
    whole = program.run(list(range(NUM_TOKENS)))
    assert_close(whole, x.float() + expected_output(layer, weights, x, logits), cases.TOLERANCES[dtype])
    assert_batch_invariant(program, whole)


def test_coded_weights_have_the_bits_of_plain_ones(native_library: NativeLibrary) -> None:
    layer = Layer(4, 2, 128, 192)
    x, logits = layer_inputs(layer, torch.bfloat16)
    packer = Packer(CPU, native_library)

    def coded(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        packed = pack_coded(native_library, weight, bias, max_escapes=1.0)
        assert packed is not None
        return packer.adopt(packed)

    results = [
        ExpertsProgram(
            native_library, layer, pack_experts(layer, cases.weights(layer), pack, torch.bfloat16), x, logits
        ).run(list(range(NUM_TOKENS)), num_threads)
        for pack, num_threads in [
            (lambda weight, bias: packer.adopt(pack_plain(native_library, weight, bias)), 1),
            (coded, 2),
            (coded, 16),  # more threads than panels
        ]
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", ["w8a8", "int8", "int4"])
@pytest.mark.parametrize("layer", [Layer(6, 2, 128, 96), Layer(3, 3, 72, 40), Layer(4, 2, 64, 96, "relu2")], ids=str)
def test_quantized_experts(native_library: NativeLibrary, layer: Layer, kind: str) -> None:
    weights = cases.weights(layer)
    dequantized = {
        name: torch.stack([quantize_weight(native_library, matrix, kind).dequantize() for matrix in stack])
        for name, stack in weights.items()
    }
    x, logits = layer_inputs(layer, torch.float32)
    pack = Packer(CPU, native_library, kind).pack
    program = ExpertsProgram(native_library, layer, pack_experts(layer, weights, pack), x, logits)
    assert "quantize_places" in program.operations
    whole = program.run(list(range(NUM_TOKENS)))
    # Activations are rounded twice, with w8a8 to 8 bits.
    assert_close(whole, x + expected_output(layer, dequantized, x, logits), 2e-2 if kind == "w8a8" else 2e-3)
    assert_batch_invariant(program, whole)


@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("name", ["small", "biases", "no gates", "one expert"])
def test_experts_through_torch(name: str, dtype: torch.dtype) -> None:
    layer = cases.CASES[name]
    weights = {key: tensor.to(dtype) for key, tensor in cases.weights(layer).items()}
    x, logits = layer_inputs(layer, dtype)
    packed = pack_experts(layer, weights, Packer(CPU).pack, dtype)
    rows = torch.arange(40)

    def compute(index: Tensor) -> Tensor:
        return experts(x[index], route(logits[index], layer.rule), packed)

    assert_close(compute(rows).float(), expected_output(layer, weights, x[rows], logits[rows]), cases.TOLERANCES[dtype])
    assert_rows_independent(compute, rows)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", [None, "int8"])
def test_ranks_that_divide_the_intermediate_width_have_the_bits_of_one(
    native_library: NativeLibrary, size: int, kind: str | None
) -> None:
    """Every rank has a part of the columns of gates and ups, and of the inputs of downs."""
    layer, num_segments = Layer(6, 2, 64, 256), 4
    weights = cases.weights(layer)
    x, logits = layer_inputs(layer, torch.float32)
    tokens = list(range(50))

    def whole() -> Tensor:
        def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
            packed = Packer(CPU, native_library, kind).pack(weight, bias)
            return packed.in_segments(num_segments, 1) if packed.num_inputs == layer.intermediate else packed

        packed = pack_experts(layer, weights, pack)
        return ExpertsProgram(native_library, layer, packed, x, logits).run(tokens)

    def compute(group: SharedMemoryGroup) -> Tensor:
        part = layer.intermediate // size
        columns = slice(group.rank * part, (group.rank + 1) * part)
        own = {
            "gate_EID": weights["gate_EID"][:, columns],
            "up_EID": weights["up_EID"][:, columns],
            "down_EDI": weights["down_EDI"][:, :, columns],
        }

        def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
            packed = Packer(CPU, native_library, kind).pack(weight.contiguous(), bias)
            return packed.in_segments(num_segments, size) if packed.num_inputs == part else packed

        packed = pack_experts(layer, own, pack)
        program = ExpertsProgram(
            native_library, layer, packed, x, logits, lambda rows: all_reduce.record(rows, group, None)
        )
        return program.run(tokens)

    area_bytes = all_reduce.exchanged_bytes(NUM_TOKENS, layer.top_k * layer.width, size)
    for result in on_ranks(native_library, size, area_bytes, compute):
        assert torch.equal(result, whole())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_divide_the_experts_have_the_bits_of_one(native_library: NativeLibrary, size: int) -> None:
    layer = cases.CASES["biases"]
    weights = cases.weights(layer)
    x, logits = layer_inputs(layer, torch.float32)
    pack, tokens = Packer(CPU, native_library).pack, list(range(50))
    whole = ExpertsProgram(native_library, layer, pack_experts(layer, weights, pack), x, logits).run(tokens)

    def compute(group: SharedMemoryGroup) -> list[Tensor]:
        own = range(layer.num_experts * group.rank // size, layer.num_experts * (group.rank + 1) // size)
        packed = pack_experts(layer, weights, pack, own=own)
        program = ExpertsProgram(
            native_library, layer, packed, x, logits, lambda rows: all_reduce.record(rows, group, None)
        )
        return [program.run(tokens, num_threads) for num_threads in (1, 2)]

    area_bytes = all_reduce.exchanged_bytes(NUM_TOKENS, layer.top_k * layer.width, size)
    for results in on_ranks(native_library, size, area_bytes, compute):
        assert all(torch.equal(result, whole) for result in results)


@pytest.mark.parametrize(
    ("name", "kind", "num_engines", "num_ranks"), [("biases", None, 2, 2), ("odd", None, 3, 1), ("small", "int8", 2, 1)]
)
def test_engines_that_divide_the_experts_have_the_bits_of_one(
    native_library: NativeLibrary, name: str, kind: str | None, num_engines: int, num_ranks: int
) -> None:
    """Each engine has its own tokens: more than the others, fewer, or none."""
    layer = cases.CASES[name]
    size = num_engines * num_ranks
    weights = cases.weights(layer)
    x, logits = layer_inputs(layer, torch.float32)
    pack = Packer(CPU, native_library, kind).pack
    whole = ExpertsProgram(native_library, layer, pack_experts(layer, weights, pack), x, logits).run(
        list(range(NUM_TOKENS))
    )
    steps = [[list(range(50)), [7], [3, 200]], [[], [299], [1]], [[5, 4], [], []], [[], [], []], [[0], [1], [2]]]

    def compute(group: SharedMemoryGroup) -> None:
        engine = group.rank // num_ranks
        own = range(layer.num_experts * group.rank // size, layer.num_experts * (group.rank + 1) // size)
        exchange = ExpertExchange(
            group,
            engine,
            num_engines,
            is_publisher=group.rank % num_ranks == 0,
            max_rows=NUM_TOKENS,
            width=layer.width,
            top_k=layer.top_k,
        )
        packed = pack_experts(layer, weights, pack, own=own)
        program = ExpertsProgram(native_library, layer, packed, x, logits, engines=exchange)
        for tokens in steps:
            assert torch.equal(program.run(tokens[engine], 1 + engine % 2), whole[tokens[engine]]), tokens

    area_bytes = exchange_area_bytes(num_engines, NUM_TOKENS, layer.width, layer.top_k)
    on_ranks(native_library, size, area_bytes, compute)


def test_experts_that_do_not_fit_are_rejected() -> None:
    layer = cases.CASES["small"]
    weights = cases.weights(layer)
    packed = pack_experts(layer, weights, Packer(CPU).pack)
    with pytest.raises(ShapeError, match="hidden states"):
        experts(random(2, 5), Routing(torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)), packed)
    with pytest.raises(ShapeError, match="different shapes"):
        PackedExperts(8, packed.gates, packed.ups, packed.gates)
    with pytest.raises(ShapeError, match="of 4"):
        PackedExperts(4, packed.gates, packed.ups, packed.downs)
    with pytest.raises(ShapeError, match="bias"):
        PackedExperts(8, packed.gates, packed.ups, packed.downs, down_bias_ED=random(8, 3))
