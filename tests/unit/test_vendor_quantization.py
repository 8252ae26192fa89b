"""`quantization_config` of AutoRound, ModelOpt and Quark: what is read, and what is refused by name."""

from typing import Any

import pytest
import torch

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights.quantized.assembly import open_format
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix

LAYER = "model.layers.3.mlp.up_proj"
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


def quark(dtype: str = "uint4", qscheme: str = "per_group", **weight: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "export": {},
        "global_quant_config": {"weight": {"dtype": dtype, "qscheme": qscheme, **weight}},
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**AUTO_ROUND, "new": 1}, "'new'"),
        ({**AUTO_ROUND, "packing_format": "auto_round:fp8"}, "'packing_format' .* is 'auto_round:fp8'"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "'data_type' in 'quantization_config' is 'mx_fp'"),
        ({**AUTO_ROUND, "act_bits": 8}, "'act_bits' in 'quantization_config' is 8"),
        ({**AUTO_ROUND, "extra_config": {LAYER: {"rotation": 1}}}, f"'rotation' of '{LAYER}' in 'extra_config'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "data_type": "fp8"}, "'data_type' is 'fp8'"),
        ({**MODELOPT, "new": 1}, "'new'"),
        ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, "'quant_algo' .* is 'W4A16_AWQ'"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "'quantized_layers' .* is missing"),
        ({**MODELOPT, "pre_quant_scale": True}, "'pre_quant_scale'"),
        (quark(), "'global_quant_config' .* weights of type 'uint4' with 'per_group' scales"),
        (quark(dtype="fp8_e4m3", qscheme="per_tensor", new=1), "'new'"),
        (quark(dtype="int8", qscheme="per_channel", symmetric=False), "'symmetric' is False"),
        ({**quark(dtype="fp8_e4m3", qscheme="per_tensor"), "layer_type_quant_config": {"A": 1}}, "'layer_type_quant_"),
        ({**quark(dtype="fp8_e4m3", qscheme="per_tensor"), "export": {"weight_format": "fake_quantized"}}, "'weight_f"),
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
