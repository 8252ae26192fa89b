"""Tiny models with recurrent layers, each with the features of its published configurations switched on."""

from typing import Any

from tiny_models import MAX_POSITIONS, VOCAB_SIZE

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
}
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
_MULTIPLIERS = {
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.3,
    "mlp_multipliers": [0.88, 0.6],
    "key_multiplier": 0.4,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.24,
    "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.3],
}
_NEMOTRON = {
    **{key: value for key, value in _BASE.items() if key != "num_hidden_layers"},
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 3,
    "ssm_state_size": 24,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 56,
}
_CONVS = ["conv", "conv", "full_attention", "conv"]
_TYPES = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]

VARIANTS = {
    "granite-hybrid-dense",
    "lfm2-bias",
    "qwen3-next-dense",
    "falcon-h1-norm",
    "falcon-h1-gate-first",
    "nemotron-h-latents",
}
"""Further members, for the long forms of the tests."""

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granite-hybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_BASE,
            **_MAMBA,
            "layer_types": _TYPES,
            "shared_intermediate_size": 56,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "position_embedding_type": "nope",
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_BASE,
            **_MAMBA,
            "layer_types": _TYPES,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "time_step_limit": [0.4, 1.5],
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_BASE, "layer_types": _CONVS, "block_multiple_of": 20, "block_ffn_dim_multiplier": 1.4},
    ),
    "lfm2-bias": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_BASE, "layer_types": _CONVS, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            **_BASE,
            "layer_types": _CONVS,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_BASE,
            **_DELTA,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3-next-dense": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_BASE,
            **_DELTA,
            "head_dim": 16,
            "linear_key_head_dim": 24,
            "linear_num_key_heads": 4,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **_BASE,
            **_MAMBA,
            **_MULTIPLIERS,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "mamba_d_ssm": 80,
            "mamba_n_heads": 10,
            "mamba_d_head": 8,
        },
    ),
    "falcon-h1-norm": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **_BASE,
            **_MAMBA,
            "num_hidden_layers": 3,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_in_multiplier": 0.7,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-gate-first": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **_BASE,
            **_MAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            "time_step_min": 0.5,
            "mlp_bias": True,
        },
    ),
    "nemotron-h-moe": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron-h-latents": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "n_routed_experts": 5,
            "norm_topk_prob": False,
            "moe_latent_size": 20,
            "mlp_bias": True,
        },
    ),
}
