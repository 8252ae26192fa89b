"""How each architecture of llama.cpp is described by the keys of a GGUF file.

Source: the converter and the loader of llama.cpp, which derive from the architecture what no key says.
"""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.frontend.model_files.gguf import hybrids, mixtures
from octavo.frontend.model_files.gguf.decoder import Config, decoder, granite, has_bias, layer_types, rotary_share
from octavo.frontend.model_files.gguf.metadata import GgufMetadata
from octavo.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """An architecture in `config.json`."""

    architecture: str
    model_type: str
    config: Callable[[GgufMetadata], Config]
    """Returns the other keys; they may replace the architecture."""


def _with_keys(change: Callable[[GgufMetadata], Config]) -> Callable[[GgufMetadata], Config]:
    return lambda gguf: decoder(gguf) | change(gguf)


def _llama(gguf: GgufMetadata) -> Config:
    config = {"attention_bias": has_bias(gguf), "sliding_window": gguf.get("attention.sliding_window")}
    if not gguf.get("expert_count"):
        return config
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": gguf.required("expert_count"),
        "num_experts_per_tok": gguf.required("expert_used_count"),
    }


def _qwen(gguf: GgufMetadata) -> Config:
    return {"sliding_window": gguf.get("attention.sliding_window")}


def _query_scalar(gguf: GgufMetadata, large_layers: int) -> int:
    """Return Gemma's `query_pre_attn_scalar`: from the width for `large_layers` layers, else the head size."""
    num_heads: int = gguf.required("attention.head_count")
    hidden_size: int = gguf.required("embedding_length")
    head_dim: int = gguf.get("attention.key_length", hidden_size // num_heads)
    return hidden_size // num_heads if gguf.required("block_count") == large_layers else head_dim


def _gemma2(gguf: GgufMetadata) -> Config:
    return {
        "attn_logit_softcapping": gguf.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": gguf.number("final_logit_softcapping", 30.0),
        "sliding_window": gguf.get("attention.sliding_window", 4096),
        "layer_types": layer_types(gguf, 2),
        "query_pre_attn_scalar": _query_scalar(gguf, 46),
    }


def _gemma3(gguf: GgufMetadata) -> Config:
    return {
        "final_logit_softcapping": gguf.number("final_logit_softcapping"),
        "sliding_window": gguf.required("attention.sliding_window"),
        "layer_types": layer_types(gguf, 6),
        "query_pre_attn_scalar": _query_scalar(gguf, 62),
        "rope_theta": gguf.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": gguf.get("rope.freq_base_swa", 10000.0),
    }


def _phi2(gguf: GgufMetadata) -> Config:
    return {"layer_norm_eps": gguf.number("attention.layer_norm_epsilon")}


def _phi3(gguf: GgufMetadata) -> Config:
    gguf.get("rope.scaling.original_context_length")  # mark as read: it is written even without a scaling
    # 0 means full attention.
    return {"sliding_window": gguf.get("attention.sliding_window") or None}


def _starcoder2(gguf: GgufMetadata) -> Config:
    return {
        "norm_epsilon": gguf.number("attention.layer_norm_epsilon"),
        "sliding_window": gguf.get("attention.sliding_window"),
        "use_bias": has_bias(gguf),
    }


def _gpt_neox(gguf: GgufMetadata) -> Config:
    return {
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": gguf.get("use_parallel_residual", True),
        "attention_bias": has_bias(gguf),
    }


def _cohere(gguf: GgufMetadata) -> Config:
    return {
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon"),
        "logit_scale": gguf.number("logit_scale"),
        "use_qk_norm": gguf.has_tensor("blk.0.attn_q_norm.weight") or None,
        "attention_bias": has_bias(gguf),
    }


def _cohere2(gguf: GgufMetadata) -> Config:
    window = {"sliding_window": gguf.required("attention.sliding_window"), "layer_types": layer_types(gguf, 4)}
    return _cohere(gguf) | window


def _olmo(gguf: GgufMetadata) -> Config:
    gguf.get("attention.layer_norm_epsilon")  # mark as read: it is 1e-5 in every OLMo
    return {"clip_qkv": gguf.number("attention.clamp_kqv")}


def _olmo2(gguf: GgufMetadata) -> Config:
    window = gguf.get("attention.sliding_window")
    if window is None:
        return {}
    config = decoder(gguf)
    theta = config["rope_theta"]
    angles = {"full_attention": config["rope_scaling"], "sliding_attention": None}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(gguf, 4),
        "rope_scaling": None,
        "rope_parameters": {
            kind: {**(scaling or {"rope_type": "default"}), "rope_theta": theta} for kind, scaling in angles.items()
        },
    }


def _glm4(gguf: GgufMetadata) -> Config:
    return {"attention_bias": has_bias(gguf), "partial_rotary_factor": rotary_share(gguf)}


def _exaone4(gguf: GgufMetadata) -> Config:
    window = gguf.get("attention.sliding_window")
    types = layer_types(gguf, 4) if window else ["full_attention"] * gguf.required("block_count")
    return {"sliding_window": window, "layer_types": types}


def _gpt2(gguf: GgufMetadata) -> Config:
    hidden_size = gguf.required("embedding_length")
    gguf.get("attention.head_count_kv")
    return {
        "n_embd": hidden_size,
        "n_inner": gguf.get("feed_forward_length", 4 * hidden_size),
        "n_layer": gguf.required("block_count"),
        "n_head": gguf.required("attention.head_count"),
        "n_positions": gguf.required("context_length"),
        "layer_norm_epsilon": gguf.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _falcon(gguf: GgufMetadata) -> Config:
    num_heads, num_kv_heads = gguf.required("attention.head_count"), gguf.get("attention.head_count_kv", 1)
    config = decoder(gguf)
    has_two_norms = gguf.has_tensor("blk.0.attn_norm_2.weight")
    is_new = has_two_norms or num_kv_heads not in (1, num_heads)
    return {
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "max_position_embeddings": config["max_position_embeddings"],
        "layer_norm_epsilon": gguf.number("attention.layer_norm_epsilon"),
        "rope_theta": config["rope_theta"],
        "rope_scaling": config["rope_scaling"],
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "multi_query": not is_new and num_kv_heads == 1,
    }


def _bloom(gguf: GgufMetadata) -> Config:
    gguf.get("attention.head_count_kv")
    return {
        "hidden_size": gguf.required("embedding_length"),
        "n_inner": gguf.required("feed_forward_length"),
        "n_layer": gguf.required("block_count"),
        "n_head": gguf.required("attention.head_count"),
        "seq_length": gguf.required("context_length"),
        "layer_norm_epsilon": gguf.number("attention.layer_norm_epsilon"),
    }


def _mpt(gguf: GgufMetadata) -> Config:
    num_heads = gguf.required("attention.head_count")
    if gguf.get("attention.head_count_kv", num_heads) != num_heads:
        raise ConfigError("an MPT with fewer heads of keys than of queries is not supported")
    bias = gguf.number("attention.max_alibi_bias", 8.0)
    attention = {"alibi": bias > 0, "alibi_bias_max": int(bias), "clip_qkv": gguf.number("attention.clamp_kqv")}
    return {
        "d_model": gguf.required("embedding_length"),
        "n_inner": gguf.required("feed_forward_length"),
        "n_layers": gguf.required("block_count"),
        "n_heads": num_heads,
        "max_seq_len": gguf.required("context_length"),
        "layer_norm_epsilon": gguf.number("attention.layer_norm_epsilon"),
        "attn_config": attention,
    }


FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", _with_keys(_llama)),  # Mistral and Mixtral too are stored as llama
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _with_keys(_qwen)),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", _with_keys(_qwen)),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", "qwen2_moe", _with_keys(mixtures.qwen_moe)),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", _with_keys(mixtures.qwen_moe)),
    "gpt2": GgufFamily("GPT2LMHeadModel", "gpt2", _gpt2),
    "gemma": GgufFamily("GemmaForCausalLM", "gemma", decoder),
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", _with_keys(_gemma2)),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", _with_keys(_gemma3)),
    "granite": GgufFamily("GraniteForCausalLM", "granite", _with_keys(granite)),
    "granitemoe": GgufFamily("GraniteMoeForCausalLM", "granitemoe", _with_keys(mixtures.granite_moe)),
    "phi2": GgufFamily("PhiForCausalLM", "phi", _with_keys(_phi2)),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3", _with_keys(_phi3)),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", "starcoder2", _with_keys(_starcoder2)),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", "gpt_neox", _with_keys(_gpt_neox)),
    "falcon": GgufFamily("FalconForCausalLM", "falcon", _falcon),
    "bloom": GgufFamily("BloomForCausalLM", "bloom", _bloom),
    "mpt": GgufFamily("MptForCausalLM", "mpt", _mpt),
    "command-r": GgufFamily("CohereForCausalLM", "cohere", _with_keys(_cohere)),
    "cohere2": GgufFamily("Cohere2ForCausalLM", "cohere2", _with_keys(_cohere2)),
    "olmo": GgufFamily("OlmoForCausalLM", "olmo", _with_keys(_olmo)),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", _with_keys(_olmo2)),  # OLMo 3 too is stored as olmo2
    "olmoe": GgufFamily("OlmoeForCausalLM", "olmoe", _with_keys(mixtures.olmoe)),
    "chatglm": GgufFamily("GlmForCausalLM", "glm", _with_keys(_glm4)),
    "glm4": GgufFamily("Glm4ForCausalLM", "glm4", _with_keys(_glm4)),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", "glm4_moe", _with_keys(mixtures.glm4_moe)),
    "exaone4": GgufFamily("Exaone4ForCausalLM", "exaone4", _with_keys(_exaone4)),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", decoder),
    "arcee": GgufFamily("ArceeForCausalLM", "arcee", decoder),
    # The file has separate queries, keys and values for InternLM 2, which makes it a Llama.
    "internlm2": GgufFamily("LlamaForCausalLM", "llama", decoder),
    "deepseek2": GgufFamily("DeepseekV2ForCausalLM", "deepseek_v2", mixtures.deepseek2),
    "mamba2": GgufFamily("Mamba2ForCausalLM", "mamba2", hybrids.mamba2),
    "granitehybrid": GgufFamily("GraniteMoeHybridForCausalLM", "granitemoehybrid", hybrids.granite_hybrid),
    "lfm2": GgufFamily("Lfm2ForCausalLM", "lfm2", hybrids.lfm2),
    "lfm2moe": GgufFamily("Lfm2MoeForCausalLM", "lfm2_moe", hybrids.lfm2_moe),
    "gpt-oss": GgufFamily("GptOssForCausalLM", "gpt_oss", mixtures.gpt_oss),
}
"""Families by `general.architecture`."""
