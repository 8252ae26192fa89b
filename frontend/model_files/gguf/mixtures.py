"""Configuration of mixtures of experts from GGUF files."""

from octavo.frontend.model_files.gguf.decoder import Config, decoder, granite, has_bias, layer_types, rotary_share
from octavo.frontend.model_files.gguf.metadata import GgufMetadata
from octavo.frontend.model_files.gguf.rope import rope_scaling
from octavo.protocol.errors import ConfigError


def _experts(gguf: GgufMetadata) -> Config:
    return {
        "num_experts": gguf.required("expert_count"),
        "num_experts_per_tok": gguf.required("expert_used_count"),
    }


def qwen_moe(gguf: GgufMetadata) -> Config:
    """Return the keys of Qwen2-MoE and Qwen3-MoE."""
    config = _experts(gguf) | {
        "moe_intermediate_size": gguf.required("expert_feed_forward_length"),
        # No key says it: llama.cpp derives it from the architecture.
        "norm_topk_prob": gguf.architecture == "qwen3moe",
    }
    if gguf.architecture == "qwen2moe":
        config["shared_expert_intermediate_size"] = gguf.required("expert_shared_feed_forward_length")
    return config


def olmoe(gguf: GgufMetadata) -> Config:
    """Return the keys of OLMoE."""
    # mark as read: written in addition to that of the RMS norms, which are the only norms
    gguf.get("attention.layer_norm_epsilon")
    return _experts(gguf) | {"norm_topk_prob": False}


def granite_moe(gguf: GgufMetadata) -> Config:
    """Return the keys of Granite-MoE."""
    return granite(gguf) | {
        "num_local_experts": gguf.required("expert_count"),
        "num_experts_per_tok": gguf.required("expert_used_count"),
    }


def _routing(gguf: GgufMetadata, score: str) -> Config:
    """Return the keys of grouped experts with shared experts."""
    gating = {1: "softmax", 2: "sigmoid"}.get(gguf.get("expert_gating_func", 1 if score == "softmax" else 2))
    if gating != score:
        raise ConfigError(f"{gguf.architecture}.expert_gating_func is not that of {score}")
    return {
        "n_routed_experts": gguf.required("expert_count"),
        "num_experts_per_tok": gguf.required("expert_used_count"),
        "n_shared_experts": gguf.get("expert_shared_count", 0),
        "moe_intermediate_size": gguf.required("expert_feed_forward_length"),
        "first_k_dense_replace": gguf.get("leading_dense_block_count", 0),
        "norm_topk_prob": gguf.get("expert_weights_norm", False),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "n_group": gguf.get("expert_group_count", 1),
        "topk_group": gguf.get("expert_group_used_count", 1),
    }


def glm4_moe(gguf: GgufMetadata) -> Config:
    """Return the keys of GLM-4.5, whose file counts the multi-token prediction layers, too."""
    num_extra = gguf.get("nextn_predict_layers", 0)
    return _routing(gguf, "sigmoid") | {
        "num_hidden_layers": gguf.required("block_count") - num_extra,
        "num_nextn_predict_layers": num_extra,
        "attention_bias": has_bias(gguf),
        "use_qk_norm": gguf.has_tensor("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": rotary_share(gguf),
    }


def deepseek2(gguf: GgufMetadata) -> Config:
    """Return the keys of DeepSeek-V2 and V3, which differ in the score of their experts.

    Files of older converters do not name the groups of experts; like llama.cpp, we then assume one group.
    """
    is_v2 = gguf.get("expert_gating_func", 1) == 1
    routing = _routing(gguf, "softmax" if is_v2 else "sigmoid")
    hidden_size, num_heads = gguf.required("embedding_length"), gguf.required("attention.head_count")
    # mark as read: 1 in files that store the keys and values of all heads as one latent vector
    gguf.get("attention.head_count_kv")
    key, value = (gguf.required(f"attention.{part}_length") for part in ("key", "value"))
    key, value = gguf.get("attention.key_length_mla", key), gguf.get("attention.value_length_mla", value)
    num_rotated, theta = gguf.required("rope.dimension_count"), gguf.get("rope.freq_base", 10000.0)
    config = routing | {
        "hidden_size": hidden_size,
        "intermediate_size": gguf.required("feed_forward_length"),
        "num_hidden_layers": gguf.required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": gguf.required("context_length"),
        "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": gguf.get("attention.q_lora_rank"),
        "kv_lora_rank": gguf.required("attention.kv_lora_rank"),
        "qk_rope_head_dim": num_rotated,
        "qk_nope_head_dim": key - num_rotated,
        "v_head_dim": value,
        "rope_theta": theta,
        "rope_scaling": rope_scaling(gguf, theta, num_rotated),
    }
    if is_v2:
        method = "group_limited_greedy" if routing["n_group"] > 1 else "greedy"
        return config | {"scoring_func": "softmax", "topk_method": method}
    return config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


def gpt_oss(gguf: GgufMetadata) -> Config:
    """Return the keys of GPT-OSS."""
    config = decoder(gguf)
    if config["rope_scaling"]:
        config["rope_scaling"]["truncate"] = False  # in every published configuration
    return config | {
        "intermediate_size": gguf.required("expert_feed_forward_length"),
        "num_local_experts": gguf.required("expert_count"),
        "num_experts_per_tok": gguf.required("expert_used_count"),
        "sliding_window": gguf.required("attention.sliding_window"),
        "layer_types": layer_types(gguf, 2),
        "attention_bias": has_bias(gguf),
    }
