"""`quantization_config` of checkpoints: what is read, and what is refused by name."""

import json
from typing import Any

import pytest
import torch
from quantized_sections import LAYER, WEIGHTS, assembled, compressed, of_layer
from torch import Tensor

from octavo.kernels.linear.packing import native_form
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.parallel.sharding import Shard
from octavo.worker_proc.weights.quantized.assembly import Assembly, open_format
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, sorted_by_group, unpack

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "checkpoint_format": "marlin"}, "'checkpoint_format' in .* is 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "'is_marlin_format'"),
        ({**GPTQ, "bits": 5}, "'bits' in 'quantization_config' is 5"),
        ({**GPTQ, "group_size": 24}, "'group_size' in 'quantization_config' is 24"),
        ({**GPTQ, "rotation": "hadamard"}, r"'rotation' \('hadamard'\) in 'quantization_config' is unknown for gptq"),
        ({**GPTQ, "dynamic": {r".*up_proj": {"bits": 8, "rotate": 1}}}, "'rotate' of 'dynamic'"),
        ({"quant_method": "gptq", "group_size": 32}, "'bits' in .* is None"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "'version' in 'quantization_config' is 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 3}, "AWQ has 4 only"),
        ({"quant_method": "awq", "group_size": 100}, "'group_size' in 'quantization_config' is 100"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "'backend' in .* is 'llm-awq'"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, "'checkpoint_format' in .* is 'gemv'"),
        ({**GPTQ, "format": "gptq_p"}, "'format' in .* is 'gptq_p'"),
        ({**GPTQ, "bits": "4"}, "'bits' in 'quantization_config' is '4'; expected int"),
        ({"quant_method": "fp8", "kv_cache_scheme": "static", "fmt": "e5m2"}, "'fmt' in .* is 'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "block"}, "'activation_scheme' in .* is 'block'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size'"),
        ({"quant_method": "bitsandbytes", "llm_int8_has_fp16_weight": True}, "'llm_int8_has_fp16_weight'"),
        ({"quant_method": "bitsandbytes", "new": 1}, "'new'"),
        ({"quant_method": "torchao", "new": 1}, "'new'"),
        ({"quant_method": "mxfp4", "new": 1}, "'new'"),
        (compressed(format="marlin-24"), "'format' in .* is 'marlin-24'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "'sparsity_config' .* 'sparse-24-bitmask'"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "'transform_config' .* rotations"),
        (compressed(group={"output_activations": {"num_bits": 8}}), "'output_activations'"),
        (compressed(group={"input_activations": {"num_bits": 6}}), "'input_activations' .* 'int' with 6 bits"),
        (compressed(group={"input_activations": {"new": 1}}), "'new'"),
        (compressed(group={"input_activations": {"strategy": "token"}}), "static activations .* 'token'"),
        (
            compressed(group={"input_activations": {"strategy": "tokens", "dynamic": True}}),
            "'strategy' in .* is 'tokens'",
        ),
        (compressed(group={"extra": 1}), "'extra'"),
        (compressed({**WEIGHTS, "strategy": "attn_head"}), "'strategy' in .* is 'attn_head'"),
        (compressed({**WEIGHTS, "num_bits": 6, "type": "float"}), "type 'float' with 6 bits"),
        (compressed({**WEIGHTS, "new": 1}), "'new'"),
        (compressed(config_groups={"W4A16": ["Linear"]}), "'config_groups' .* preset"),
        (compressed(config_groups=None), "'config_groups' in .* is None"),
        (compressed({**WEIGHTS, "group_size": 24}), "groups of 24 inputs"),
        (compressed({**WEIGHTS, "group_size": "32"}), "'group_size' in 'weights of group_0' is '32'"),
        (
            compressed(group={"weights": None, "targets": ["LlamaAttention"]}),
            r"activations of \['LlamaAttention'\] without quantized weights \(group 'group_0'\)",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_format(config, {})


@pytest.mark.parametrize(
    ("activations", "rows", "warning"),
    [
        ({"dynamic": True, "strategy": "token"}, "int8_token", ""),
        ({"strategy": "tensor"}, "int8_tensor", ""),  # static unless said otherwise
        ({"type": "float", "dynamic": True, "strategy": "group", "group_size": 128}, "fp8_token", ""),
        ({"symmetric": False, "dynamic": True, "strategy": "token"}, None, "activations of 8 bits with zero points"),
        ({"type": "float", "num_bits": 4, "dynamic": "local", "group_size": 16}, None, "activations of 4 bits, which"),
    ],
)
def test_activations(
    activations: dict[str, Any], rows: str | None, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {**WEIGHTS, "num_bits": 8}
    layout = open_format(compressed(weights, group={"input_activations": activations}), {}).layout(LAYER)
    assert layout is not None and layout.rows == rows
    assert warning in caplog.text and bool(caplog.text) == bool(warning)


def gptq_tensors(bits: int = 4) -> dict[str, Tensor]:
    """A layer of 64 inputs and 16 outputs."""
    return {
        "qweight": torch.zeros(64 * bits // 32, 16, dtype=torch.int32),
        "qzeros": torch.zeros(2, 16 * bits // 32, dtype=torch.int32),
        "scales": torch.ones(2, 16, dtype=torch.float16),
        "g_idx": torch.arange(64, dtype=torch.int32) // 32,
    }


def test_a_layer_is_complete_with_its_last_tensor() -> None:
    other = {"model.norm.weight": torch.ones(4), f"{LAYER}.bias": torch.ones(16)}
    first, *rest = of_layer(gptq_tensors()).items()
    taken = assembled(GPTQ, dict([first, *other.items(), *rest]))
    assert [name for name, _ in taken] == [*other, f"{LAYER}.weight"]
    matrix = taken[-1][1]
    assert isinstance(matrix, StoredMatrix) and matrix.shape == (16, 64)
    assert matrix.dequantized().eq(-1).all()  # zero points are stored minus one


def test_names_without_quantization_say_what_other_stages_hold() -> None:
    form = open_format(GPTQ, {})
    assembly = Assembly(form, of_layer(gptq_tensors()))
    assert assembly.plain_name(f"{LAYER}.g_idx") == assembly.plain_name(f"{LAYER}.qweight") == f"{LAYER}.weight"
    assert assembly.plain_name(f"{LAYER}.bias") == f"{LAYER}.bias"


def test_rules_of_layers() -> None:
    rules = {r"-:.*\.0\..*": {}, r".*\.up_proj": {"bits": 8}, r"+:.*mlp.*": {"bits": 2}}
    ((_, eight),) = assembled({**GPTQ, "dynamic": rules}, of_layer(gptq_tensors(8)))
    assert eight.shape == (16, 64)
    ((_, two),) = assembled({**GPTQ, "dynamic": rules}, of_layer(gptq_tensors(2), "model.layers.3.mlp.gate_proj"))
    assert two.shape == (16, 64)
    with pytest.raises(ConfigError, match=r"leaves out 'model\.layers\.0\.mlp\.up_proj'"):
        assembled({**GPTQ, "dynamic": rules}, of_layer(gptq_tensors(), "model.layers.0.mlp.up_proj"))


def test_names_come_before_classes() -> None:
    weights = {"weight": torch.ones(16, 64, dtype=torch.int8), "weight_scale": torch.ones(16, 2)}
    eight = {**WEIGHTS, "num_bits": 8}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": eight},
        "group_1": {"targets": [r"re:.*\.3\..*up"], "weights": {**eight, "group_size": None, "strategy": "group"}},
    }
    config = compressed(config_groups=groups)
    ((_, matrix),) = assembled(config, of_layer(weights))
    quantized = matrix.quantized() if isinstance(matrix, StoredMatrix) else None
    assert quantized is not None and quantized.group_size == 32 and quantized.dequantize().eq(1).all()
    with pytest.raises(ConfigError, match="no group in 'config_groups'"):
        assembled(
            compressed(config_groups={"group_1": groups["group_1"]}), of_layer(weights, "model.layers.4.mlp.up_proj")
        )


GPTQMODEL = {"group_size": 32, "desc_act": False, "lm_head": False, "pack_dtype": "int32", "meta": {"mse": 0.0}}


@pytest.mark.parametrize(("method", "form"), [("gptq", "gptq"), ("gptq", "gptq_v2"), ("awq", "gemm")])
def test_settings_that_gptqmodel_7_writes(method: str, form: str) -> None:
    config = {**GPTQMODEL, "quant_method": method, "method": method, "format": form, "checkpoint_format": form}
    config |= {"version": form, "zero_point": False} if method == "awq" else {"sym": False}
    layout = open_format({**config, "bits": 4}, {}).layout(LAYER)
    assert layout is not None and (layout.bits, layout.group_size, layout.has_zeros) == (4, 32, True)


def packed(values: list[int], bits: int) -> Tensor:
    number = sum(value << (bits * place) for place, value in enumerate(values))
    words = [(number >> (32 * word)) & 0xFFFFFFFF for word in range(-(-len(values) * bits // 32))]
    return torch.tensor(words).to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_0_borrow_from_the_next_one(bits: int) -> None:
    """GPTQModel subtracts one from a word of zero points at once, but from each zero point of 3 bits."""
    zeros = [zero % 2**bits for zero in (0, 1, -1, 0, 0, *range(11))]
    ones = packed([1] * (32 // bits), bits)
    words = packed([(zero - 1) % 8 for zero in zeros], 3) if bits == 3 else packed(zeros, bits) - ones
    tensors = gptq_tensors(bits) | {"qzeros": torch.stack([words, words])}
    ((_, matrix),) = assembled({**GPTQ, "bits": bits}, of_layer(tensors))
    assert isinstance(matrix, StoredMatrix)
    assert matrix.dequantized()[:, 0].tolist() == [-zero for zero in zeros]


def test_several_groups_match() -> None:
    """compressed-tensors applies names, then expressions in alphabetical order, whatever the order of the groups."""
    order = (r"re:.*mlp\..*", r"re:.*down_proj", "model.layers.0.mlp.down_proj")
    groups = {
        f"group_{index}": {"targets": [target], "weights": {**WEIGHTS, "group_size": 16 * (index + 1)}}
        for index, target in enumerate(order)
    }
    form = open_format(compressed(config_groups=groups), {})
    layers = [f"model.layers.{number}" for number in ("0.mlp.down_proj", "1.mlp.down_proj", "1.mlp.up_proj")]
    assert [layout and layout.group_size for layout in map(form.layout, layers)] == [48, 32, 16]


def test_missing_and_wrong_tensors_are_named() -> None:
    tensors = gptq_tensors()
    del tensors["scales"]
    with pytest.raises(ConfigError, match=rf"lacks '{LAYER}.scales'"):
        assembled(GPTQ, of_layer(tensors))
    with pytest.raises(ConfigError, match=rf"'{LAYER}.weight' of type torch.int8, without scales"):
        assembled(compressed(), of_layer({"weight": torch.ones(4, 4, dtype=torch.int8)}))
    with pytest.raises(ConfigError, match=f"lacks '{LAYER}.input_scale'"):
        static = {"weight": torch.zeros(4, 16).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)}
        assembled({"quant_method": "fp8", "activation_scheme": "static"}, of_layer(static))
    ((_, matrix),) = assembled(GPTQ, of_layer(gptq_tensors() | {"scales": torch.ones(3, 16).half()}))
    with pytest.raises(ConfigError, match=rf"the tensors of '{LAYER}' do not fit .* scales of .* shape \(16, 3\)"):
        matrix.dequantized() if isinstance(matrix, StoredMatrix) else None
    with pytest.raises(ConfigError, match=rf"'{LAYER}.qzeros' has shape \(4,\); expected 2 dimensions"):
        assembled(GPTQ, of_layer(gptq_tensors() | {"qzeros": torch.zeros(4, dtype=torch.int32)}))
    with pytest.raises(ConfigError, match=r"is of type torch\.uint8"):  # 4-bit floats, where integers are configured
        packed = {"weight_packed": torch.zeros(16, 32, dtype=torch.uint8), "weight_scale": torch.ones(16, 2)}
        assembled(compressed(), of_layer(packed | {"weight_shape": torch.tensor([16, 64])}))


def test_scales_that_do_not_fit_are_refused() -> None:
    weight = torch.zeros(40, 32).to(torch.float8_e4m3fn)
    for config, scale, message in (
        (
            {"quant_method": "fp8", "weight_block_size": [16, 16]},
            {"weight_scale_inv": torch.ones(4, 2)},
            r"scales of \(4, 2\) blocks; expected \(3, 2\)",
        ),
        ({"quant_method": "fp8"}, {"weight_scale": torch.ones(3)}, r"scales of shape \(3,\) for 40 outputs"),
    ):
        ((_, matrix),) = assembled(config, of_layer({"weight": weight, **scale}))
        with pytest.raises(ConfigError, match=message):
            matrix.dequantized() if isinstance(matrix, StoredMatrix) else None


def torchao_layer(scale: torch.Tensor | None = None, **activations: object) -> QuantizedWeight:
    kwargs = {"mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}, "reduce_range": False, **activations}
    fields = {"block_size": [1, 32], "act_quant_kwargs": {"_data": kwargs}}
    form = open_format({"quant_method": "torchao"}, {"a.weight": json.dumps({"_type": "Int8Tensor", "_data": fields})})
    tensors = {"_weight_qdata": torch.ones(8, 32, dtype=torch.int8), "_weight_scale": torch.ones(8, 1)}
    matrix = form.matrix("a", tensors if scale is None else {**tensors, "_weight_act_quant_scale": scale})
    weight = matrix.quantized()
    assert weight is not None
    return weight


def test_activations_of_torchao(caplog: pytest.LogCaptureFixture) -> None:
    assert torchao_layer().row_form == ("int8_token", None, "reciprocal")
    assert torchao_layer(torch.tensor([[0.5]])).row_form == ("int8_tensor", 0.5, "reciprocal")
    with pytest.raises(ConfigError, match="8 scales of activations; expected one"):
        torchao_layer(torch.ones(8, 1))
    with pytest.raises(ConfigError, match="reduce_range"):
        torchao_layer(reduce_range=True)
    assert not caplog.records
    assert torchao_layer(mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"}).row_type is None
    assert "zero points" in caplog.text


def test_scales_of_the_cache_are_left_out() -> None:
    names = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale")
    assert assembled(GPTQ, {f"model.layers.0.{name}": torch.ones(1) for name in names}) == []


def test_groups_that_ranks_would_divide_are_refused() -> None:
    ((_, matrix),) = assembled(GPTQ, of_layer(gptq_tensors()))
    assert isinstance(matrix, StoredMatrix)
    assert matrix.part(Shard(1, 64, (range(32, 64),))).quantized() is not None
    part = matrix.part(Shard(1, 64, (range(16),)))
    assert part.dequantized().shape == (16, 16)
    with pytest.raises(ConfigError, match="64 inputs in groups of 32, which the ranks cannot divide"):
        part.quantized()


def test_parts_of_parts() -> None:
    tensors = gptq_tensors()
    tensors["qweight"] = torch.randint(-(2**31), 2**31 - 1, (8, 16)).int()
    ((_, matrix),) = assembled(GPTQ, of_layer(tensors))
    assert isinstance(matrix, StoredMatrix)
    dense = matrix.dequantized()
    rows = matrix.part(Shard(0, 16, (range(8, 16), range(4)))).part(Shard(0, 12, (range(1, 12, 2),)))
    assert torch.equal(rows.dequantized(), dense[[9, 11, 13, 15, 1, 3]])
    inner = rows.part(Shard(1, 64, (range(32, 64),)))
    assert torch.equal(inner.dequantized(), dense[[9, 11, 13, 15, 1, 3]][:, 32:])


def test_orders_of_inputs() -> None:
    assert sorted_by_group(torch.arange(64) // 32, 32, LAYER) is None
    order = sorted_by_group(torch.tensor([1, 0] * 32), 32, LAYER)
    assert order is not None and order.tolist() == [*range(1, 64, 2), *range(0, 64, 2)]
    with pytest.raises(ConfigError, match="an order of inputs"):
        sorted_by_group(torch.zeros(64), 32, LAYER)


@pytest.mark.parametrize("bits", range(2, 9))
def test_unpacking(bits: int) -> None:
    levels = torch.randint(0, 2**bits, (3, 64))
    words = torch.stack([packed(row.tolist(), bits) for row in levels])
    assert torch.equal(unpack(words, bits).long(), levels)


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
def test_zero_points_near_the_middle_of_the_levels_are_not_rounded(bits: int) -> None:
    levels = torch.randint(0, 2**bits, (32, 64))
    zeros = 2 ** (bits - 1) + torch.arange(64).view(2, 32) % 4 - 1  # by group and output
    tensors = {
        "weight_packed": torch.stack([packed(row.tolist(), bits) for row in levels]),
        "weight_zero_point": torch.stack([packed(row.tolist(), bits) for row in zeros]).t().contiguous(),
        "weight_shape": torch.tensor([32, 64]),
        "weight_scale": torch.full((32, 2), 1025 / 8192),
    }
    config = compressed({**WEIGHTS, "num_bits": bits, "symmetric": False})
    ((_, matrix),) = assembled(config, of_layer(tensors))
    assert isinstance(matrix, StoredMatrix)
    weight = matrix.quantized()
    assert weight is not None
    expected = (levels - zeros.t().repeat_interleave(32, 1)) * (1025 / 8192)
    assert torch.equal(weight.dequantize(), expected)
    form = native_form(weight)
    assert form is not None and torch.equal(form.dequantize(), expected)
