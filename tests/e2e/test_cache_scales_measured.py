"""`--calculate-kv-scales`: the scales are those of `transformers`' keys and values, on any number of ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rank_threads import on_ranks
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from worker_plans import loaded, worker_config

from octavo import LLM, SamplingParams
from octavo.kernels.native import library
from octavo.kernels.native.rank_group import SharedMemoryGroup
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.cache_calibration import MAX_TOKENS, calibration_tokens, measure_cache_scales
from octavo.worker_proc.parallel.group import SharedMemoryRanks
from octavo.worker_proc.weights.cache_scales import CacheScales
from octavo.worker_proc.weights.load import load_model

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
LAYERS = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in two cache groups, whose layers have keys and values of different sizes."""
    path = make_tiny("Qwen3ForCausalLM", tmp_path_factory.mktemp("model"), **LAYERS)
    weights = load_file(path / "model.safetensors")
    for layer, factor in enumerate((0.01, 1.0, 500.0)):
        weights[f"model.layers.{layer}.self_attn.k_norm.weight"] *= factor
        weights[f"model.layers.{layer}.self_attn.v_proj.weight"] *= factor**2
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def wanted_scales(path: Path) -> CacheScales:
    """Return twice the largest number of `transformers`' cache over 448, rounded up to a power of two."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = calibration_tokens(model.config.vocab_size, MAX_TOKENS)
    found: list[tuple[float, float]] = []

    class Cache(transformers.DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
            assert layer_idx == len(found)
            found.append((key_states.abs().max().item(), value_states.abs().max().item()))
            return super().update(key_states, value_states, layer_idx, *more, **named)

    with torch.inference_mode():
        model(torch.tensor([tokens]), None, None, Cache())  # by position: transformers 5.24 renamed it
    return {
        layer: tuple(2.0 ** math.ceil(math.log2(2 * largest / 448)) for largest in pair)
        for layer, pair in enumerate(found)
    }


def test_scales_are_those_of_the_keys_and_values_of_transformers(model_path: Path) -> None:
    config = worker_config(model_path, **FP8)
    model = loaded(config)
    wanted = wanted_scales(model_path)
    assert len({scale for pair in wanted.values() for scale in pair}) > 4
    assert measure_cache_scales(model, config, None) == wanted
    assert measure_cache_scales(model, config, None) == wanted, "again, as in a worker that takes its place"
    short = worker_config(model_path, max_model_len=33, max_num_batched_tokens=32, max_num_seqs=8, **FP8)
    for layer, scales in measure_cache_scales(model, short, None).items():
        assert all(scale <= of_all for scale, of_all in zip(scales, wanted[layer], strict=True))


@pytest.mark.parametrize("arch", ["GPT2LMHeadModel", "DeepseekV3ForCausalLM"])
def test_other_attention_has_scales_too(arch: str, tmp_path: Path) -> None:
    config = worker_config(make_tiny(arch, tmp_path), **FP8)
    scales = measure_cache_scales(loaded(config), config, None)
    assert len(scales) == 2 and all(0 < scale < 1 for pair in scales.values() for scale in pair)
    if arch == "DeepseekV3ForCausalLM":
        assert all(of_keys == of_values for of_keys, of_values in scales.values())


def test_ranks_have_the_same_scales(model_path: Path) -> None:
    config = worker_config(model_path, tensor_parallel_size=2, num_threads=1, **FP8)  # ranks share a pool of threads
    native = library.load()

    def measure(group: SharedMemoryGroup) -> CacheScales:
        ranks = SharedMemoryRanks(group)
        model = load_model(config, lambda fraction: None, library=native, rank=group.rank, group=ranks)
        return measure_cache_scales(model, config, None)

    assert on_ranks(native, 2, 1 << 24, measure) == [wanted_scales(model_path)] * 2


def test_a_layer_whose_keys_are_no_numbers_is_told(tmp_path: Path) -> None:
    path = make_tiny("LlamaForCausalLM", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = worker_config(path, **FP8)
    with pytest.raises(ConfigError, match="keys or values of layer 1 are no numbers"):
        measure_cache_scales(loaded(config), config, None)


def test_a_checkpoint_with_scales_is_not_measured(tmp_path: Path) -> None:
    path = make_tiny("LlamaForCausalLM", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights |= {f"model.layers.0.self_attn.{kind}_scale": torch.tensor([0.5]) for kind in "kv"}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="the checkpoint has scales of keys and values for 1 layers"):
        loaded(worker_config(path, **FP8))


@pytest.mark.parametrize(
    "parallel",
    [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long)],
    ids=str,
)
def test_engines_of_several_workers_give_the_same_tokens(model_path: Path, parallel: dict[str, int]) -> None:
    """With tensor parallelism, sums do not depend on it here; keys and values beyond the scales of 1 would be cut."""
    prompts = [{"prompt_token_ids": [(7 * place) % 300 for place in range(length)]} for length in (60, 3)]
    sampling = SamplingParams(max_tokens=20, temperature=0.0, logprobs=1, ignore_eos=True)
    outputs = []
    for more in ({}, parallel):
        settings = {"dtype": "float32", "max_model_len": 256, "enable_tp_invariant_inference": True, **FP8, **more}
        with LLM(str(model_path), **settings) as llm:
            found = llm.generate(prompts, sampling)
            outputs.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found])
    assert outputs[0] == outputs[1]
