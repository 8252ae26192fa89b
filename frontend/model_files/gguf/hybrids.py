"""Configuration of models with recurrent layers from GGUF files."""

from octavo.frontend.model_files.gguf.decoder import Config, granite
from octavo.frontend.model_files.gguf.metadata import GgufMetadata


def _any_layer_has(gguf: GgufMetadata, name: str) -> bool:
    return any(gguf.has_tensor(f"blk.{layer}.{name}") for layer in range(gguf.required("block_count")))


def _sizes(gguf: GgufMetadata) -> Config:
    return {
        "hidden_size": gguf.required("embedding_length"),
        "num_hidden_layers": gguf.required("block_count"),
        "max_position_embeddings": gguf.required("context_length"),
    }


def _attention(gguf: GgufMetadata, recurrent: str) -> Config:
    """Return the keys of attention; layers without key heads are of the type `recurrent`."""
    num_heads, num_kv_heads = gguf.required("attention.head_count"), gguf.per_layer("attention.head_count_kv")
    counts = num_kv_heads if isinstance(num_kv_heads, list) else [num_kv_heads] * gguf.required("block_count")
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(counts),
        "head_dim": gguf.get("attention.key_length", gguf.required("embedding_length") // num_heads),
        "layer_types": ["full_attention" if count else recurrent for count in counts],
        "rope_theta": gguf.get("rope.freq_base", 10000.0),
    }


def mamba2(gguf: GgufMetadata) -> Config:
    """Return the keys of Mamba-2."""
    for unused in ("feed_forward_length", "attention.head_count"):
        gguf.get(unused)
    num_heads, inner_width = gguf.required("ssm.time_step_rank"), gguf.required("ssm.inner_size")
    return _sizes(gguf) | {
        "num_heads": num_heads,
        "head_dim": inner_width // num_heads,
        "expand": inner_width // gguf.required("embedding_length"),
        "state_size": gguf.required("ssm.state_size"),
        "n_groups": gguf.required("ssm.group_count"),
        "conv_kernel": gguf.required("ssm.conv_kernel"),
        "layer_norm_epsilon": gguf.number("attention.layer_norm_rms_epsilon"),
        "use_bias": gguf.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": gguf.has_tensor("blk.0.ssm_conv1d.bias"),
    }


def granite_hybrid(gguf: GgufMetadata) -> Config:
    """Return the keys of Granite 4."""
    attention, num_experts = _attention(gguf, "linear_attention"), gguf.get("expert_count", 0)
    num_heads, inner_width = gguf.required("ssm.time_step_rank"), gguf.required("ssm.inner_size")
    width = gguf.required("feed_forward_length")
    gguf.get("rope.dimension_count")
    return (
        _sizes(gguf)
        | attention
        | granite(gguf)
        | {
            "intermediate_size": width,
            "shared_intermediate_size": gguf.get("expert_shared_feed_forward_length", width),
            "num_local_experts": num_experts,
            "num_experts_per_tok": gguf.get("expert_used_count", 0),
            "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
            "position_embedding_type": "rope" if gguf.get("rope.scaling.finetuned", True) else "nope",
            "attention_bias": _any_layer_has(gguf, "attn_q.bias"),
            "mamba_n_heads": num_heads,
            "mamba_d_head": inner_width // num_heads,
            "mamba_expand": inner_width // gguf.required("embedding_length"),
            "mamba_d_state": gguf.required("ssm.state_size"),
            "mamba_n_groups": gguf.required("ssm.group_count"),
            "mamba_d_conv": gguf.required("ssm.conv_kernel"),
            "mamba_proj_bias": _any_layer_has(gguf, "ssm_in.bias"),
            "mamba_conv_bias": _any_layer_has(gguf, "ssm_conv1d.bias"),
        }
    )


def lfm2(gguf: GgufMetadata) -> Config:
    """Return the keys of LFM2."""
    return (
        _sizes(gguf)
        | _attention(gguf, "conv")
        | {
            "intermediate_size": gguf.required("feed_forward_length"),
            "block_auto_adjust_ff_dim": False,
            "norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
            "conv_L_cache": gguf.required("shortconv.l_cache"),
            "conv_bias": _any_layer_has(gguf, "shortconv.conv.bias"),
        }
    )


def lfm2_moe(gguf: GgufMetadata) -> Config:
    """Return the keys of LFM2-MoE."""
    config = lfm2(gguf)
    del config["block_auto_adjust_ff_dim"]
    gguf.get("expert_gating_func")  # mark as read: sigmoid in all of them
    return config | {
        "num_experts": gguf.required("expert_count"),
        "num_experts_per_tok": gguf.required("expert_used_count"),
        "moe_intermediate_size": gguf.required("expert_feed_forward_length"),
        "num_dense_layers": gguf.get("leading_dense_block_count", 0),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "use_expert_bias": _any_layer_has(gguf, "exp_probs_b.bias"),
    }
