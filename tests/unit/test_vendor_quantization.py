"""`quantization_config` of AutoRound, ModelOpt and Quark: what is read, and what is refused by name."""

import re
from typing import Any

import pytest
import torch

from octavo.protocol.config.weight_format import cache_scheme
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights.quantized.assembly import Assembly, open_format
from octavo.worker_proc.weights.quantized.layer_rules import is_listed
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix
from octavo.worker_proc.weights.quantized.modelopt import ModelOpt

LAYER = "model.layers.3.mlp.up_proj"
STACK = "model.layers.0.feed_forward.experts.gate_up_proj"
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


def quark(dtype: str = "uint4", qscheme: str = "per_group", **weight: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "export": {},
        "global_quant_config": {"weight": {"dtype": dtype, "qscheme": qscheme, **weight}},
    }


def compressed(**group: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], **group}}}


def mixed(settings: Any) -> dict[str, Any]:
    layers = {LAYER: settings, "model.layers.0.mlp.up_proj": {"quant_algo": "FP8_PB_WO", "group_size": 128}}
    return {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**AUTO_ROUND, "new": 1}, "'new'"),
        ({**AUTO_ROUND, "packing_format": "auto_round:fp8"}, "'packing_format' .* is 'auto_round:fp8'"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "'data_type' in 'quantization_config' is 'mx_fp'"),
        ({**AUTO_ROUND, "act_bits": 8}, "'act_bits' in 'quantization_config' is 8"),
        ({**AUTO_ROUND, "extra_config": {LAYER: {"rotation": 1}}}, f"'rotation' of '{LAYER}' in 'extra_config'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "data_type": "fp8"}, "'data_type' in .* is 'fp8'"),
        ({**MODELOPT, "new": 1}, "'new'"),
        ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, "'quant_algo' .* is 'W4A16_AWQ'"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "'quantized_layers' .* is missing"),
        ({**MODELOPT, "pre_quant_scale": True}, "'pre_quant_scale'"),
        (quark(), "'global_quant_config' .* weights of type 'uint4' with 'per_group' scales"),
        (quark(dtype="fp8_e4m3", qscheme="per_tensor", new=1), "'new'"),
        (quark(dtype="int8", qscheme="per_channel", symmetric=False), "'symmetric' in .* is False"),
        ({**quark(dtype="fp8_e4m3", qscheme="per_tensor"), "layer_type_quant_config": {"A": 1}}, "'layer_type_quant_"),
        ({**quark(dtype="fp8_e4m3", qscheme="per_tensor"), "export": {"weight_format": "fake_quantized"}}, "'weight_f"),
        (quark(dtype="int8", qscheme="per_channel", ch_axis=1), "'ch_axis' in .* is 1"),
        (quark(dtype="fp8_e4m3", qscheme="per_block", block_size=["a", 1]), r"'block_size' .* is \['a', 1\]"),
        (
            {**quark(dtype="int8", qscheme="per_tensor"), "kv_cache_quant_config": {"*k_proj": {}}},
            "'kv_cache_quant_conf",
        ),
        ({**MODELOPT, "quant_algo": "NVFP4", "group_size": 32}, "'group_size' in .* is 32; only 16"),
        ({**MODELOPT, "group_size": 128}, "'group_size' in .* is 128; only 0"),
        (mixed({"quant_algo": "NVFP4", "group_size": 32}), "'group_size' in .* is 32; only 16"),
        (
            mixed({"quant_algo": "NVFP4", "pre_quant_scale": True}),
            "'pre_quant_scale' in '.*up_proj in quantized_layers'",
        ),
        (mixed({"quant_algo": "FP8", "has_zero_point": True}), "'has_zero_point' in '.*up_proj in quantized_layers'"),
        (mixed({"quant_algo": "FP8", "new": 1}), "'new' .* in '.*up_proj in quantized_layers'"),
        (mixed("FP8"), "'.*up_proj in quantized_layers' .* is 'FP8'; expected an object"),
        ({**AUTO_ROUND, "extra_config": {LAYER: 8}}, f"'{LAYER}' in 'extra_config' .* is 8; expected an object"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:a": None}},
            "in 'dynamic' .* is None",
        ),
        ({"quant_method": "fp8", "weight_block_size": ["x", 128]}, r"'weight_block_size' .* is \['x', 128\]"),
        (compressed(weights={"block_structure": [1]}), r"'block_structure' .* is \[1\]"),
        (compressed(weights={}, input_activations=5), "'input_activations' in .* is 5"),
        ({**AUTO_ROUND, "block_name_to_quantize": 5}, "'block_name_to_quantize' .* has 5"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_format(config, {})


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:(": {}}},
        {**AUTO_ROUND, "extra_config": {"(": {"bits": 8}}},
        {**MODELOPT, "ignore": ["("]},
    ],
)
def test_patterns_that_are_none(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'\(' in 'quantization_config' is not a regular expression"):
        open_format(config, {}).layout(LAYER)


@pytest.mark.parametrize(
    ("patterns", "is_in"),
    [
        (["up_proj"], True),
        (["model.layers.3"], True),
        (["model.layers.*.up_proj"], True),
        (["model.layers.3?mlp.*"], True),
        (["*.layers.[0-2].*"], False),
        (["*layersx3*", "*layers.3.mlp_up*", "*.layers.30.*"], False),
        (["*layers?3.mlp.up_pro."], False),
        ([r"model\.layers\.(3|4)"], True),
        ([r"model\.layers\.(3|4)\.mlp\.up"], False),
        (["re:.*up_proj$"], True),
    ],
)
def test_lists_of_layers(patterns: list[Any], is_in: bool) -> None:
    assert is_listed(LAYER, patterns) is is_in


def test_a_number_in_a_list_of_layers() -> None:
    with pytest.raises(ConfigError, match="3 is in a list of layers in 'quantization_config'"):
        is_listed(LAYER, [3])


def test_blocks_of_auto_round_are_whole_names() -> None:
    form = open_format({**AUTO_ROUND, "block_name_to_quantize": [["model.layers.1"], ["model.layers.2."]]}, {})
    layouts = [form.layout(f"model.layers.{index}.mlp.up_proj") for index in (1, 2, 10, 3)]
    assert [layout is not None for layout in layouts] == [True, True, False, False]


def test_gptq_and_awq_that_auto_round_writes() -> None:
    notes = {
        "autoround_version": "0.16.1",
        "iters": 200,
        "data_type": "int",
        "enable_quanted_input": True,
        "nsamples": 8,
    }
    for method in ("gptq", "awq"):
        assert open_format({"quant_method": method, "bits": 4, "group_size": 32, **notes}, {}).layout(LAYER)


@pytest.mark.parametrize(
    ("packing", "zero"), [("auto_round:auto_gptq", 1), ("auto_round:gptq:exllamav2", 1), ("auto_round:gptqmodel", 0)]
)
def test_layers_of_auto_round(packing: str, zero: int) -> None:
    others = {LAYER: {"bits": 8}, ".*down_proj.*": {"bits": 16}}
    config = {**AUTO_ROUND, "packing_format": packing, "extra_config": others, "block_name_to_quantize": "model.layers"}
    form = open_format(config, {})
    tensors = {
        "qweight": torch.zeros(16, 16, dtype=torch.int32),
        "qzeros": torch.zeros(2, 4, dtype=torch.int32),
        "scales": torch.ones(2, 16, dtype=torch.float16),
    }
    eight = form.matrix(LAYER, tensors)
    assert eight.shape == (16, 64) and isinstance(eight, StoredMatrix) and eight.dequantized().eq(-zero).all()
    down = "model.layers.3.mlp.down_proj"
    with pytest.raises(ConfigError, match=f"gives '{down}' 16 bits or more"):
        form.matrix(down, tensors)
    layouts = [form.layout(layer) for layer in (LAYER, "model.layers.3.mlp.gate_proj", down, "lm_head")]
    assert [layout and layout.bits for layout in layouts] == [8, 4, None, None]


def test_layers_of_modelopt() -> None:
    layers = {LAYER: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.0.mlp.up_proj": {"quant_algo": "fp8"}}
    form = open_format({**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, {})
    layouts = [form.layout(layer) for layer in (*layers, "model.layers.1.mlp.up_proj")]
    assert [layout and layout.codebook for layout in layouts] == ["e2m1", "e4m3", None]
    weight = torch.ones(256, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=f"'{LAYER}.pre_quant_scale', scales of activations"):
        form.matrix(LAYER, {"weight": weight, "weight_scale": torch.ones(1), "pre_quant_scale": torch.ones(128)})
    with pytest.raises(ConfigError, match=rf"'{LAYER}.weight_scale' has shape \(3,\)"):
        form.matrix(LAYER, {"weight": weight, "weight_scale": torch.ones(3)})


@pytest.mark.parametrize(
    ("dtype", "shape", "scale"),
    [
        (torch.uint8, (2, 16, 8), (2, 8, 2)),
        (torch.float8_e4m3fn, (2, 16, 8), (2, 1, 8)),
        (torch.int8, (2, 16, 8), ()),
        (torch.uint8, (2,), (2, 8, 2)),
        (torch.float8_e4m3fn, (), ()),
    ],
)
def test_stacks_of_modelopt_in_another_order(
    dtype: torch.dtype, shape: tuple[int, ...], scale: tuple[int, ...]
) -> None:
    assembly = Assembly(open_format(MODELOPT, {}), {STACK, f"{STACK}_weight_scale"})
    assert assembly.take(STACK, torch.zeros(shape).to(dtype)) is None
    message = rf"has shape {re.escape(str(shape))}, and its scales .*; expected experts of FP8"
    with pytest.raises(ConfigError, match=message):
        assembly.take(f"{STACK}_weight_scale", torch.ones(scale))


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("weight_scale_2", (2, 2), r"_weight_scale_2' has shape \(2, 2\); expected one number, or one for each of 2"),
        ("weight_scale_2", (2, 1, 8), r"_weight_scale_2' has shape \(2, 1, 8\)"),
        ("input_scale", (3,), r"_input_scale' has shape \(3,\)"),
    ],
)
def test_scales_of_experts_of_modelopt(part: str, shape: tuple[int, ...], message: str) -> None:
    tensors = {
        "weight": torch.zeros(2, 16, 8, dtype=torch.uint8),
        "weight_scale": torch.ones(2, 2, 8).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(2),
        "input_scale": torch.ones(2, 1),
    }
    form = open_format({**MODELOPT, "quant_algo": "NVFP4"}, {})
    assert isinstance(form, ModelOpt)
    assert form.stack(STACK, tensors)
    with pytest.raises(ConfigError, match=message):
        form.stack(STACK, {**tensors, part: torch.ones(shape)})


def test_layers_of_quark() -> None:
    fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    outputs = {"weight": fp8, "input_tensors": {**fp8, "is_dynamic": True}, "output_tensors": fp8}
    section = {**quark(**fp8), "layer_quant_config": {"*k_proj": outputs, "*up_proj": {"weight": None}}}
    with pytest.raises(ConfigError, match=r"'layer_quant_config of \*k_proj' .* quantized outputs"):
        open_format(section, {})
    form = open_format({**section, "export": {"kv_cache_group": ["*k_proj"]}}, {})
    tensors = {"weight": torch.ones(16, 32).to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}
    for layer, rows in (("model.layers.0.self_attn.k_proj", "fp8_token"), ("model.layers.0.self_attn.q_proj", None)):
        matrix = form.matrix(layer, tensors)
        assert isinstance(matrix, StoredMatrix) and (weight := matrix.quantized()) is not None
        assert weight.row_type == rows
    assert form.layout(LAYER) is None
    with pytest.raises(ConfigError, match=f"holds '{LAYER}' quantized"):
        form.matrix(LAYER, tensors)


@pytest.mark.parametrize(
    ("weight", "rows", "expected"),
    [
        ("per_channel", {"qscheme": "per_channel", "is_dynamic": True, "ch_axis": 1}, "fp8_token"),
        ("per_tensor", {"qscheme": "per_tensor", "is_dynamic": True}, "fp8_token"),
        ("per_tensor", {"qscheme": "per_group", "is_dynamic": True, "group_size": 128}, None),
        ("per_block", {"qscheme": "per_group", "is_dynamic": True, "group_size": 64}, None),
        ("per_block", {"qscheme": "per_group", "is_dynamic": True, "group_size": 128}, "fp8_token"),
        ("per_block", {"qscheme": "per_block", "is_dynamic": True, "block_size": [1, 128]}, "fp8_token"),
    ],
)
def test_rows_of_quark(weight: str, rows: dict[str, Any], expected: str | None) -> None:
    section = quark(dtype="fp8_e4m3", qscheme=weight, block_size=[128, 128])
    section["global_quant_config"]["input_tensors"] = {"dtype": "fp8_e4m3", **rows}
    tensors = {"weight": torch.ones(16, 16).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1, 1)}
    matrix = open_format(section, {}).matrix(LAYER, tensors)
    assert isinstance(matrix, StoredMatrix) and (found := matrix.quantized()) is not None
    assert found.row_type == expected


def test_rows_of_quark_along_another_dimension() -> None:
    section = quark(dtype="fp8_e4m3", qscheme="per_tensor")
    section["global_quant_config"]["input_tensors"] = {
        "dtype": "fp8_e4m3",
        "qscheme": "per_channel",
        "is_dynamic": True,
        "ch_axis": -1,
    }
    with pytest.raises(ConfigError, match=r"'ch_axis' in .* is -1"):
        open_format(section, {})


def test_zero_points_of_quark() -> None:
    tensors = {"weight": torch.ones(16, 16, dtype=torch.int8), "weight_scale": torch.ones(())}
    zeros = {"weight_zero_point": torch.zeros(1, dtype=torch.int8), "input_zero_point": torch.ones(1, dtype=torch.int8)}
    section = quark(dtype="int8", qscheme="per_tensor", symmetric=None)
    assert open_format(section, {}).matrix(LAYER, tensors | zeros).shape == (16, 16)  # nothing of activations is used
    with pytest.raises(ConfigError, match=f"'{LAYER}.weight_zero_point' with numbers other than 0"):
        open_format(section, {}).matrix(LAYER, {**tensors, "weight_zero_point": torch.tensor([3], dtype=torch.int8)})
    section["global_quant_config"]["input_tensors"] = {"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": True}
    with pytest.raises(ConfigError, match=f"'{LAYER}.input_zero_point' with numbers other than 0"):
        open_format(section, {}).matrix(LAYER, tensors | zeros)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_the_scales_of_a_stack_under_names_that_are_not_read(dtype: torch.dtype) -> None:
    stack = "model.layers.0.feed_forward.experts.gate_up_proj"
    form = open_format(quark(dtype="fp8_e4m3", qscheme="per_tensor"), {})
    assembly = Assembly(form, {stack, f"{stack}_weight_scale", f"{stack}_input_scale"})
    with pytest.raises(ConfigError, match=f"quantized experts with scales in '{stack}_weight_scale'"):
        assembly.take(stack, torch.zeros(2, 4, 4).to(dtype))


@pytest.mark.parametrize("of_layers", [{"*k_proj": None}, {"*k_proj": {"output_tensors": [1]}}, [], None])
def test_layers_of_quarks_cache_that_are_not_described(of_layers: Any) -> None:
    section = {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj"]}, "layer_quant_config": of_layers}
    with pytest.raises(ConfigError, match=r"names '\*k_proj', and 'layer_quant_config' has no 'output_tensors'"):
        cache_scheme(section)
    with pytest.raises(ConfigError, match=r"'kv_cache_group' .* is 5"):
        cache_scheme({**section, "export": {"kv_cache_group": 5}})


def test_layers_of_quarks_cache_are_alike() -> None:
    outputs = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    layers = {"*k_proj": {"output_tensors": outputs}, "*v_proj": {"output_tensors": outputs}}
    section = {"quant_method": "quark", "export": {"kv_cache_group": [*layers]}, "layer_quant_config": layers}
    assert cache_scheme(section) == {"num_bits": 8, "type": "float", "dynamic": False}
    layers["*v_proj"] = {"output_tensors": {**outputs, "dtype": "int8"}}
    with pytest.raises(ConfigError, match=r"'dtype' .* is 'fp8_e4m3' for '\*k_proj', and 'int8' for '\*v_proj'"):
        cache_scheme(section)
    layers["*v_proj"] = {}
    with pytest.raises(ConfigError, match=r"names '\*v_proj', and 'layer_quant_config' has no 'output_tensors'"):
        cache_scheme(section)
