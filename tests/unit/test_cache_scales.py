"""The scales of keys and values that checkpoints have, by the names of several tools."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from core_fakes import core_config
from safetensors.torch import save_file

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights.cache_scales import CacheScales, read_cache_scales

FLOAT8 = {"kv_cache_scheme": {"type": "float", "num_bits": 8}}


def read(folder: Path, scales: dict[str, float], section: dict[str, Any] | None = None) -> CacheScales:
    save_file({name: torch.tensor(scale) for name, scale in scales.items()}, folder / "model.safetensors")
    facts = msgspec.structs.replace(
        core_config().model,
        model_path=str(folder),
        load_format="safetensors",
        hf_config={"quantization_config": section} if section else {},
    )
    return read_cache_scales(facts, range(2))


@pytest.mark.parametrize(
    "names",
    [
        {"self_attn.k_scale": 0.5, "self_attn.v_scale": 0.25, "self_attn.q_scale": 3.0},
        {"self_attn.k_proj.k_scale": 0.5, "self_attn.v_proj.v_scale": 0.25},
        {"self_attn.k_proj.output_scale": 0.5, "self_attn.v_proj.output_scale": 0.25},
    ],
)
def test_names_of_scales(tmp_path: Path, names: dict[str, float]) -> None:
    assert read(tmp_path, {f"model.layers.1.{name}": scale for name, scale in names.items()}) == {1: (0.5, 0.25)}


def test_one_scale_of_both_and_layers_of_other_stages(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.kv_scale": 0.5, "model.layers.7.self_attn.kv_scale": 2.0}
    assert read(tmp_path, scales) == {0: (0.5, 0.5)}


def test_no_scales(tmp_path: Path) -> None:
    assert read(tmp_path, {"model.layers.0.self_attn.k_proj.weight_scale": 1.0}) == {}
    with pytest.raises(ConfigError, match="promises scales of the cache"):
        read(tmp_path, {"model.norm.weight": 1.0}, FLOAT8)
    with pytest.raises(ConfigError, match="promises scales of the cache"):  # AutoFP8
        read(tmp_path, {"model.norm.weight": 1.0}, {"quant_method": "fp8", "kv_cache_scheme": "static"})
    # ModelOpt leaves out scales of 1.
    modelopt = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    assert read(tmp_path, {"model.norm.weight": 1.0}, modelopt) == {}


def test_scales_of_another_type_of_cache(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.kv_scale": 0.5}
    assert read(tmp_path, scales, {"kv_cache_scheme": {"type": "int", "num_bits": 8}}) == {}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_damaged_scales(tmp_path: Path, scale: float) -> None:
    with pytest.raises(ConfigError, match=r"self_attn\.kv_scale is"):
        read(tmp_path, {"model.layers.0.self_attn.kv_scale": scale})


def test_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer 0 has a scale of keys"):
        read(tmp_path, {"model.layers.0.self_attn.k_scale": 0.5})
