"""Tiny random-weight models in Hugging Face layout, one for every architecture, for tests that need a model.

`make_tiny("LlamaForCausalLM", directory)` writes config.json, generation_config.json, model.safetensors
and a small byte-level tokenizer with a chat template. The same arguments give the same weights.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
"""256 bytes, the special tokens and a few dozen merges; the models' vocabulary has this size too."""
MAX_POSITIONS = 1024
BOS, EOS, TURN_END = "<|begin|>", "<|end|>", "<|turn_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|turn_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog tells the fox that this was not the plan",
    "one request, one batch, one block: the same tokens in the same order, whatever else the engine is doing",
)

_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", _LLAMA),
    "MistralForCausalLM": ("MistralConfig", {**_LLAMA, "sliding_window": None}),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        {key: value for key, value in _LLAMA.items() if key != "head_dim"},
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", _LLAMA),
    "OPTForCausalLM": (
        "OPTConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "word_embed_proj_dim": 48,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": MAX_POSITIONS},
    ),
}
ARCHITECTURES = tuple(_CONFIGS)
_EXPERTS = {**_LLAMA, "moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 3}
_LATENT = {
    **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
    "num_key_value_heads": 6,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
_MOE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": (
        "DeepseekV2Config",
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "n_shared_experts": 2,
        },
    ),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {**_LATENT, "q_lora_rank": 24, "n_shared_experts": 1}),
    "Glm4MoeForCausalLM": (
        "Glm4MoeConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 50,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "GraniteMoeForCausalLM": (
        "GraniteMoeConfig",
        {
            **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.5,
        },
    ),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        {
            **_LLAMA,
            "intermediate_size": 40,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 50,
            "floor_scale": 24,
            "attn_scale": 0.5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "OlmoeForCausalLM": (
        "OlmoeConfig",
        {
            **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**_LLAMA, "sliding_window": None, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {
            **{key: value for key, value in _EXPERTS.items() if key != "head_dim"},
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
        },
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True}),
}
MOE_ARCHITECTURES = tuple(_MOE_CONFIGS)
"""Mixtures of experts; apart from the others so that not every test of all architectures takes twice as long."""


def make_tiny(
    arch: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    class_name: str | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a tiny model of architecture `arch` into `directory` and return it.

    Args:
        arch: one of `ARCHITECTURES` or `MOE_ARCHITECTURES`, or another one with all of its settings.
        directory: made if it does not exist.
        seed: seed of the weights.
        dtype: data type of the weights.
        class_name: class name of the configuration of another architecture.
        config_overrides: settings of the configuration.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    config_class, settings = (class_name, {}) if class_name else (_CONFIGS | _MOE_CONFIGS)[arch]
    settings = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None, **settings, **config_overrides}
    model = getattr(transformers, arch)(getattr(transformers, config_class)(**settings))
    _randomize(model, seed)
    model.generation_config = transformers.GenerationConfig(bos_token_id=bos, eos_token_id=eos)
    model.to(dtype).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return directory


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Give all parameters and the biases of routing values so large that the logits differ clearly."""
    generator, kind = torch.Generator().manual_seed(seed), type(model).__name__
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            # Stored as the distance to one.
            is_from_one = is_norm and ("Gemma" in kind or ("Qwen3Next" in kind and "linear_attn" not in name))
            parameter.copy_(1.0 + 0.2 * noise if is_norm and not is_from_one else 0.2 * noise)
            if name.endswith("A_log"):
                parameter.sub_(3.0)  # states that last for dozens of tokens
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True) for text in (BOS, EOS, TURN_END)],
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer
