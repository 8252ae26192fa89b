"""Tiny models of the dense families, each with the features of its published configurations switched on."""

from typing import Any

from tiny_hybrids import FAMILIES as HYBRIDS
from tiny_models import MAX_POSITIONS, VOCAB_SIZE

WINDOW = 40
"""Window of sliding layers: shorter than the prompts of the tests, and not a multiple of a block."""

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
}
_WIDE = {**_BASE, "head_dim": 16}
_FALCON = {key: value for key, value in _BASE.items() if key not in ("num_key_value_heads", "intermediate_size")}
_LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 4.0, 16.0],
    "original_max_position_embeddings": 512,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 256}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_WIDE, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_WIDE,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_WIDE,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "layer_types": _LAYERS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": _ROPE,
            },
        },
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_BASE, "rope_parameters": _LONG_ROPE, "tie_word_embeddings": True}),
    "phi3-window": ("Phi3ForCausalLM", "Phi3Config", {**_BASE, "sliding_window": WINDOW}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**_BASE, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_BASE, "num_key_value_heads": 6}),
    "gpt-neox-serial": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {
            **_BASE,
            "num_key_value_heads": 6,
            "use_parallel_residual": False,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            **_BASE,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", {**_BASE, "clip_qkv": 0.8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _BASE),
    "olmo3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {
            **_BASE,
            "sliding_window": WINDOW,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": {**_ROPE, "rope_theta": 500000.0}},
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", _BASE),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", _WIDE),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**_BASE, "logit_scale": 0.3}),
    "cohere-norms": ("CohereForCausalLM", "CohereConfig", {**_BASE, "use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**_BASE, "sliding_window": WINDOW, "logit_scale": 0.5}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 2,
            "time_step_limit": (0.3, 1.1),
            "use_bias": True,
        },
    ),
    "mamba2-tied": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 40,
            "num_hidden_layers": 2,
            "num_heads": 5,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**_BASE, "sliding_window": WINDOW}),
    "glm": ("GlmForCausalLM", "GlmConfig", _WIDE),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", _WIDE),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", {**_WIDE, "sliding_window": WINDOW}),
    "exaone4-full": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {**_WIDE, "sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "ministral": (
        "MinistralForCausalLM",
        "MinistralConfig",
        {**_WIDE, "sliding_window": WINDOW, "layer_types": _LAYERS},
    ),
    "qwen2-windows": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_BASE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3-windows": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**_WIDE, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _LAYERS},
    ),
    "falcon-7b": ("FalconForCausalLM", "FalconConfig", {**_FALCON, "multi_query": True}),
    "falcon-40b": (
        "FalconForCausalLM",
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-rw": (
        "FalconForCausalLM",
        "FalconConfig",
        {**_FALCON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 48,
            "n_layers": 3,
            "n_heads": 6,
            "max_seq_len": MAX_POSITIONS,
            "attn_config": {"clip_qkv": 0.8},
        },
    ),
    "llama-dynamic": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_WIDE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}},
    ),
    **HYBRIDS,
}
"""Name to architecture, class of the configuration, and its settings."""
