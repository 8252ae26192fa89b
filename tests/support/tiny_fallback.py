"""Tiny models of architectures that have no family here, with the features of their published configurations."""

from typing import Any

from tiny_families import WINDOW
from tiny_models import MAX_POSITIONS, VOCAB_SIZE

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
}
_NO_GROUPS = {**_BASE, "num_key_value_heads": 6}
_EXPERTS = {**_BASE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

FALLBACKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", "ApertusConfig", {**_BASE, "rope_parameters": {"rope_type": "default"}}),
    "biogpt": ("BioGptForCausalLM", "BioGptConfig", _NO_GROUPS),
    "aria": ("AriaTextForCausalLM", "AriaTextConfig", {**_BASE, "moe_num_experts": 6, "moe_topk": 2}),
    "bitnet": ("BitNetForCausalLM", "BitNetConfig", _BASE),
    "camembert": (
        "CamembertForCausalLM",
        "CamembertConfig",
        {**_NO_GROUPS, "is_decoder": True, "max_position_embeddings": 514, "pad_token_id": 1},
    ),
    "codegen": (
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "n_positions": MAX_POSITIONS,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "rotary_dim": 4,
        },
    ),
    "ctrl": (
        "CTRLLMHeadModel",
        "CTRLConfig",
        {"vocab_size": VOCAB_SIZE, "n_positions": MAX_POSITIONS, "n_embd": 48, "dff": 96, "n_layer": 3, "n_head": 6},
    ),
    "cwm": ("CwmForCausalLM", "CwmConfig", {**_BASE, "sliding_window": WINDOW, "layer_types": _LAYERS, "head_dim": 8}),
    "ernie4.5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {**_BASE, "head_dim": 16, "use_bias": True}),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {**_EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "flex-olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", _EXPERTS),
    "gpt-bigcode": (
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"vocab_size": VOCAB_SIZE, "n_positions": MAX_POSITIONS, "n_embd": 48, "n_layer": 3, "n_head": 6},
    ),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_POSITIONS,
            "hidden_size": 48,
            "num_layers": 4,
            "num_heads": 6,
            "attention_types": [[["global", "local"], 2]],
            "window_size": WINDOW,
        },
    ),
    "gpt-neox-japanese": ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", _NO_GROUPS),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "n_positions": MAX_POSITIONS,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "rotary_dim": 4,
        },
    ),
    "helium": ("HeliumForCausalLM", "HeliumConfig", {**_BASE, "head_dim": 8}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {**_BASE, "head_dim": 8}),
    "jais2": ("Jais2ForCausalLM", "Jais2Config", _BASE),
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {**_BASE, "num_key_value_heads": 3, "kv_channels": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "laguna": ("LagunaForCausalLM", "LagunaConfig", {**_EXPERTS, "head_dim": 8}),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        {
            **_NO_GROUPS,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "modernbert-decoder": (
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderConfig",
        {**_BASE, "local_attention": 2 * WINDOW, "layer_types": _LAYERS},
    ),
    "nanochat": ("NanoChatForCausalLM", "NanoChatConfig", _BASE),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {**_BASE, "head_dim": 8, "partial_rotary_factor": 0.5}),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", {**_NO_GROUPS, "qk_layernorm": True}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {**_EXPERTS, "num_local_experts": 6}),
    "roberta": (
        "RobertaForCausalLM",
        "RobertaConfig",
        # Tokens of padding have positions of their own; this one is in no prompt of the tests.
        {**_NO_GROUPS, "is_decoder": True, "max_position_embeddings": 514, "pad_token_id": 1},
    ),
    "seed-oss": ("SeedOssForCausalLM", "SeedOssConfig", {**_BASE, "head_dim": 16}),
    "stablelm": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**_BASE, "use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.25},
    ),
    "vaultgemma": (
        "VaultGemmaForCausalLM",
        "VaultGemmaConfig",
        {
            **_BASE,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _LAYERS,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
}
