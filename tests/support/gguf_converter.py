"""Writes a GGUF file of a complete tiny model like the converter of llama.cpp: names, keys, and the order of rows.

The names come from the `gguf` package. The transformations of each architecture are restated here from llama.cpp's
converter, so that our reader has an independent counterpart.
"""

# long: one table of what is done to each architecture

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

Config = dict[str, Any]
Arrays = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Conversion:
    """The transformations that llama.cpp's converter applies to an architecture of Hugging Face."""

    arch: MODEL_ARCH
    keys: Callable[[GGUFWriter, Config], None]
    """Writes the keys that only some architectures have."""
    is_permuted: bool = False
    adds_one: bool = False
    change: Callable[[str, np.ndarray, Config], Arrays] = lambda name, values, config: iter([(name, values)])
    """Returns the replacement of a tensor, still under Hugging Face's names."""


def convert(
    model: Path,
    file: Path,
    conversion: Conversion | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tensors_per_file: int = 0,
) -> Path:
    """Write the model of a directory as a GGUF file with matrices of type `kind`.

    `conversion`: None: that of its architecture. `tensors_per_file`: 0: there is one file; otherwise llama.cpp's names
    of parts take the place of `file`.
    """
    config = json.loads((model / "config.json").read_text())
    conversion = conversion or CONVERSIONS[config["architectures"][0]]
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[conversion.arch], split_max_tensors=tensors_per_file)
    write_common_keys(writer, config)
    conversion.keys(writer, config)
    write_tokenizer(writer, model)
    num_layers = next(config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config)
    names = gguf.get_tensor_name_map(conversion.arch, num_layers)
    for name, values in converted(load_file(model / "model.safetensors"), config, conversion):
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        assert new_name.startswith(("blk.", "token_embd", "position_embd", "output")), name
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(new_name, values)
        else:
            writer.add_tensor(new_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, factors in rope_factors(config):
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def converted(tensors: dict[str, np.ndarray], config: Config, conversion: Conversion) -> Arrays:
    """Yield the tensors of a file under Hugging Face's names, experts stacked."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if conversion.is_permuted and (match := re.search(r"\.([qk])_proj\.", name)):
            values = interleaved(values, num_heads(config) if match[1] == "q" else num_kv_heads(config))
        if conversion.adds_one and name.endswith("norm.weight"):
            values = values + np.float32(1)
        for new_name, part in conversion.change(name, values, config):
            if match := re.search(r"\.experts\.(\d+)\.", new_name):
                experts.setdefault(new_name.replace(match[0], ".experts."), {})[int(match[1])] = part
            else:
                yield new_name, part
    for name, parts in experts.items():
        yield name, np.stack([parts[expert] for expert in sorted(parts)])


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleave rows: row i and row i + half of a head become its rows 2i and 2i + 1."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def num_heads(config: Config) -> int:
    return next(config[key] for key in ("num_attention_heads", "n_head", "n_heads") if key in config)


def num_kv_heads(config: Config) -> int:
    if config["model_type"] == "falcon":
        return config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    return config.get("num_key_value_heads", num_heads(config))


def rope(config: Config) -> Config:
    """Return the parameters of rotary embedding, of full attention if layers differ."""
    parameters = config.get("rope_parameters") or {}
    return parameters.get("full_attention", parameters)


def rotated(config: Config) -> int:
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads(config)
    return int(head_dim * rope(config).get("partial_rotary_factor", 1.0))


def write_common_keys(writer: GGUFWriter, config: Config) -> None:
    def first(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    is_mamba, epsilon = config["model_type"] == "mamba2", first("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    values = {
        writer.add_block_count: first("num_hidden_layers", "n_layer", "n_layers"),
        writer.add_context_length: first("max_position_embeddings", "n_positions", "max_seq_len", "seq_length") or 2048,
        writer.add_embedding_length: first("hidden_size", "n_embd", "d_model"),
        writer.add_feed_forward_length: feed_forward_length(config),
        writer.add_head_count: 0 if is_mamba else num_heads(config),
        writer.add_head_count_kv: kv_heads_of_layers(config),
        writer.add_rope_freq_base: rope(config).get("rope_theta"),
        writer.add_layer_norm_rms_eps: epsilon if is_mamba else first("rms_norm_eps"),
        writer.add_layer_norm_eps: None if is_mamba else epsilon,
        writer.add_expert_count: first("num_local_experts", "num_experts", "n_routed_experts"),
        writer.add_expert_used_count: first("num_experts_per_tok"),
        writer.add_vocab_size: config["vocab_size"],
        writer.add_file_type: 0,
    }
    if "kv_lora_rank" not in config and config["model_type"] != "mamba2" and config.get("head_dim"):
        values |= {writer.add_key_length: config["head_dim"], writer.add_value_length: config["head_dim"]}
    for add, value in values.items():
        if value is not None:
            add(value)
    write_scaling(writer, rope(config))


def feed_forward_length(config: Config) -> int:
    names = ("intermediate_size", "n_inner", "ffn_hidden_size")
    width = next((config[name] for name in names if config.get(name) is not None), 192)
    if config.get("block_auto_adjust_ff_dim"):
        width, multiple = int(2 * width / 3), config["block_multiple_of"]
        return -(-int(config["block_ffn_dim_multiplier"] * width) // multiple) * multiple
    return width


def kv_heads_of_layers(config: Config) -> int | list[int] | None:
    match config["model_type"]:
        case "mamba2":
            return None
        case "granitemoehybrid" | "lfm2" | "lfm2_moe":
            is_attention = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
            return [num_kv_heads(config) if attends else 0 for attends in is_attention]
    return num_kv_heads(config)


def write_scaling(writer: GGUFWriter, parameters: Config) -> None:
    match parameters.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(parameters["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(parameters["factor"])
            writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])


def rope_factors(config: Config) -> Iterator[tuple[str, list[float]]]:
    parameters = rope(config)
    if parameters.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", parameters["long_factor"]
        yield "rope_factors_short.weight", parameters["short_factor"]
    if parameters.get("rope_type") == "llama3":
        width, theta, factor = rotated(config), parameters["rope_theta"], parameters["factor"]
        factors = []
        for index in range(0, width, 2):
            wavelength = 2 * math.pi * theta ** (index / width)
            smooth = (8192 / wavelength - 1) / (4 - 1)
            between = 1 / ((1 - smooth) / factor + smooth)
            factors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else between)
        yield "rope_freqs.weight", factors


def write_tokenizer(writer: GGUFWriter, model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[number] for number in range(len(tokens))])
    writer.add_token_types([3 if number in special else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def no_keys(writer: GGUFWriter, config: Config) -> None:
    """Write no further keys."""


def rotary_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(rotated(config))


def gemma2_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def window_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"] or 0)
    rotary_keys(writer, config)


def patterned_keys(writer: GGUFWriter, config: Config) -> None:
    if config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def olmo2_keys(writer: GGUFWriter, config: Config) -> None:
    if "sliding_window" in config:
        patterned_keys(writer, config)
        writer.add_rope_scaling_attn_factors(0.1 * math.log(rope(config)["factor"]) + 1.0)


def phi3_keys(writer: GGUFWriter, config: Config) -> None:
    window_keys(writer, config)
    original = rope(config).get("original_max_position_embeddings", config["max_position_embeddings"])
    writer.add_rope_scaling_orig_ctx_len(original)
    if rope(config).get("rope_type") == "longrope":
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def granite_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    rotary_keys(writer, config)


def cohere_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config["model_type"] == "cohere2":
        window_keys(writer, config)


def clamp_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_layer_norm_eps(1e-5)
    writer.add_clamp_kqv(config["clip_qkv"])


def mpt_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])


def neox_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_parallel_residual(config["use_parallel_residual"])
    rotary_keys(writer, config)


def falcon_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_tensor_data_layout("jploski")


def qwen_moe_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)


def routing_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
    is_v2 = config["model_type"] == "deepseek_v2"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if is_v2 else gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def glm_moe_keys(writer: GGUFWriter, config: Config) -> None:
    routing_keys(writer, config)
    rotary_keys(writer, config)
    writer.add_nextn_predict_layers(0)


def deepseek_keys(writer: GGUFWriter, config: Config) -> None:
    routing_keys(writer, config)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def gpt_oss_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def stacked_qkv(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Yield the rows of all queries, then keys, then values, instead of those of each key head."""
    if "query_key_value" in name:
        heads, kv_heads = num_heads(config), num_kv_heads(config)
        head_dim = len(values) // (heads + 2 * kv_heads)
        groups = values.reshape(kv_heads, heads // kv_heads + 2, head_dim, *values.shape[1:])
        parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
        values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
    yield name, values


def bloom_parts(name: str, values: np.ndarray, config: Config) -> Arrays:
    yield from stacked_qkv(name.removeprefix("transformer."), values, config)


def granite_experts(name: str, values: np.ndarray, config: Config) -> Arrays:
    if not name.endswith("input_linear.weight"):
        yield name, values
        return
    layer = name.split(".")[2]
    gates, ups = np.split(values, 2, axis=1)
    yield f"blk.{layer}.ffn_gate_exps.weight", gates
    yield f"blk.{layer}.ffn_up_exps.weight", ups


def deepseek_parts(name: str, values: np.ndarray, config: Config) -> Arrays:
    if name.endswith("e_score_correction_bias"):
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values
    elif name.endswith("kv_b_proj.weight"):
        heads = values.reshape(num_heads(config), -1, values.shape[1])
        keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    else:
        yield name, values


def gpt_oss_parts(name: str, values: np.ndarray, config: Config) -> Arrays:
    name = name.replace("self_attn.sinks", "self_attn.sinks.weight")
    kind = "bias" if name.endswith("_bias") else "weight"
    layer = "".join(name.split(".")[2:3])
    if "gate_up_proj" in name:
        rows = values if kind == "bias" else values.swapaxes(1, 2)
        yield f"blk.{layer}.ffn_gate_exps.{kind}", rows[:, 0::2]
        yield f"blk.{layer}.ffn_up_exps.{kind}", rows[:, 1::2]
    elif "down_proj" in name:
        yield f"blk.{layer}.ffn_down_exps.{kind}", values if kind == "bias" else values.swapaxes(1, 2)
    else:
        yield name, values


def ssm_keys(writer: GGUFWriter, config: Config) -> None:
    prefix = "mamba_" if "mamba_n_heads" in config else ""
    names = ("n_heads", "d_head", "d_state", "n_groups", "d_conv")
    plain = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    heads, head_dim, state, groups, conv = (config[prefix + name] for name in (names if prefix else plain))
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def hybrid_keys(writer: GGUFWriter, config: Config) -> None:
    granite_keys(writer, config)
    ssm_keys(writer, config)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def lfm2_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])


def lfm2_moe_keys(writer: GGUFWriter, config: Config) -> None:
    lfm2_keys(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def ssm_parts(name: str, values: np.ndarray, config: Config) -> Arrays:
    if name.endswith(".A_log"):
        values = -np.exp(values[:, None])
    elif name.endswith((".mixer.D", ".mamba.D")):
        values = values[:, None]
    elif name.endswith("conv1d.weight"):
        values = values[:, 0]
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        values = values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if "shared_mlp.input_linear" in name:
        layer = name.split(".")[2]
        gates, ups = np.split(values, 2)
        yield f"blk.{layer}.ffn_gate_shexp.weight", gates
        yield f"blk.{layer}.ffn_up_shexp.weight", ups
    else:
        yield from granite_experts(name, values, config)


def lfm2_parts(name: str, values: np.ndarray, config: Config) -> Arrays:
    values = values[:, 0] if name.endswith("conv.conv.weight") else values
    name = name.replace(".expert_bias", ".expert_bias.bias")
    yield name.removeprefix("model.") if ".experts." in name else name, values


def transposed(name: str, values: np.ndarray, config: Config) -> Arrays:
    yield name, values.T if values.ndim == 2 and ".h." in name else values


CONVERSIONS = {
    "LlamaForCausalLM": Conversion(MODEL_ARCH.LLAMA, rotary_keys, is_permuted=True),
    "MistralForCausalLM": Conversion(MODEL_ARCH.LLAMA, rotary_keys, is_permuted=True),
    "MixtralForCausalLM": Conversion(MODEL_ARCH.LLAMA, rotary_keys, is_permuted=True),
    "Qwen2ForCausalLM": Conversion(MODEL_ARCH.QWEN2, no_keys),
    "Qwen3ForCausalLM": Conversion(MODEL_ARCH.QWEN3, no_keys),
    "Qwen2MoeForCausalLM": Conversion(MODEL_ARCH.QWEN2MOE, qwen_moe_keys),
    "Qwen3MoeForCausalLM": Conversion(MODEL_ARCH.QWEN3MOE, qwen_moe_keys),
    "GPT2LMHeadModel": Conversion(MODEL_ARCH.GPT2, no_keys, change=transposed),
    "GemmaForCausalLM": Conversion(MODEL_ARCH.GEMMA, no_keys, adds_one=True),
    "Gemma2ForCausalLM": Conversion(MODEL_ARCH.GEMMA2, gemma2_keys, adds_one=True),
    "Gemma3ForCausalLM": Conversion(MODEL_ARCH.GEMMA3, window_keys, adds_one=True),
    "GraniteForCausalLM": Conversion(MODEL_ARCH.GRANITE, granite_keys, is_permuted=True),
    "GraniteMoeForCausalLM": Conversion(MODEL_ARCH.GRANITE_MOE, granite_keys, True, change=granite_experts),
    "PhiForCausalLM": Conversion(MODEL_ARCH.PHI2, rotary_keys),
    "Phi3ForCausalLM": Conversion(MODEL_ARCH.PHI3, phi3_keys),
    "Starcoder2ForCausalLM": Conversion(MODEL_ARCH.STARCODER2, no_keys),
    "GPTNeoXForCausalLM": Conversion(MODEL_ARCH.GPTNEOX, neox_keys, change=stacked_qkv),
    "FalconForCausalLM": Conversion(MODEL_ARCH.FALCON, falcon_keys, change=stacked_qkv),
    "BloomForCausalLM": Conversion(MODEL_ARCH.BLOOM, no_keys, change=bloom_parts),
    "MptForCausalLM": Conversion(MODEL_ARCH.MPT, mpt_keys),
    "CohereForCausalLM": Conversion(MODEL_ARCH.COMMAND_R, cohere_keys),
    "Cohere2ForCausalLM": Conversion(MODEL_ARCH.COHERE2, cohere_keys),
    "OlmoForCausalLM": Conversion(MODEL_ARCH.OLMO, clamp_keys, is_permuted=True),
    "Olmo2ForCausalLM": Conversion(MODEL_ARCH.OLMO2, olmo2_keys),
    "Olmo3ForCausalLM": Conversion(MODEL_ARCH.OLMO2, olmo2_keys),
    "OlmoeForCausalLM": Conversion(MODEL_ARCH.OLMOE, no_keys),
    "GlmForCausalLM": Conversion(MODEL_ARCH.CHATGLM, rotary_keys),
    "Glm4ForCausalLM": Conversion(MODEL_ARCH.GLM4, rotary_keys),
    "Glm4MoeForCausalLM": Conversion(MODEL_ARCH.GLM4_MOE, glm_moe_keys, change=deepseek_parts),
    "Exaone4ForCausalLM": Conversion(MODEL_ARCH.EXAONE4, patterned_keys),
    "SmolLM3ForCausalLM": Conversion(MODEL_ARCH.SMOLLM3, rotary_keys, is_permuted=True),
    "ArceeForCausalLM": Conversion(MODEL_ARCH.ARCEE, rotary_keys, is_permuted=True),
    "DeepseekV2ForCausalLM": Conversion(MODEL_ARCH.DEEPSEEK2, deepseek_keys, change=deepseek_parts),
    "DeepseekV3ForCausalLM": Conversion(MODEL_ARCH.DEEPSEEK2, deepseek_keys, change=deepseek_parts),
    "Mamba2ForCausalLM": Conversion(MODEL_ARCH.MAMBA2, ssm_keys, change=ssm_parts),
    "GraniteMoeHybridForCausalLM": Conversion(MODEL_ARCH.GRANITE_HYBRID, hybrid_keys, True, change=ssm_parts),
    "Lfm2ForCausalLM": Conversion(MODEL_ARCH.LFM2, lfm2_keys, change=lfm2_parts),
    "Lfm2MoeForCausalLM": Conversion(MODEL_ARCH.LFM2MOE, lfm2_moe_keys, change=lfm2_parts),
    "GptOssForCausalLM": Conversion(MODEL_ARCH.GPT_OSS, gpt_oss_keys, change=gpt_oss_parts),
}
"""Conversions by `architectures[0]` of a `config.json`."""
