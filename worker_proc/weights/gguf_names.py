"""Where each tensor of a GGUF file belongs in the original checkpoint, as data.

GGUF's names are the same for all architectures; Hugging Face's are the models' own.
"""

import re
from dataclasses import dataclass
from typing import Literal

from octavo.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HfPlace:
    """Name in the original checkpoint, and what the converter did to the tensor."""

    name: str
    rope_heads: Literal["query", "key"] | None = None
    """Rows were interleaved for rotary embedding, by heads of this kind."""
    is_transposed: bool = False
    is_stacked: bool = False
    """The tensor holds a matrix of each expert; `name` has {} for the expert's number."""
    is_row: bool = False
    """The tensor is the only row of a matrix."""


_LLAMA = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTRAL = _LLAMA | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN_MOE = _LLAMA | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT2 = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_TABLES = {
    "llama": _MIXTRAL,  # Mixtral too is stored as llama
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen2moe": _QWEN_MOE,
    "qwen3moe": _QWEN_MOE,
    "gpt2": _GPT2,
}

_ROPE_HEADS: dict[str, Literal["query", "key"]] = {"attn_q": "query", "attn_k": "key"}

# GPT-2 checkpoints hold (inputs, outputs) matrices, which the converter transposes.
_GPT2_TURNED = frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})

# The factors of scaled rotary embedding are read with the metadata, when the model's config is built.
_ROPE_FACTORS = "rope_freqs.weight"

_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_place(architecture: str, name: str) -> HfPlace | None:
    """Return the place of a tensor; None if it is not a weight of the original checkpoint.

    Raises:
        ConfigError: the architecture, or the tensor within it, is unknown.
    """
    table = _TABLES.get(architecture)
    if table is None:
        raise ConfigError(
            f"GGUF architecture {architecture!r} is not supported", hint="supported: " + ", ".join(sorted(_TABLES))
        )
    if name == _ROPE_FACTORS:
        return None
    if name in table:
        return HfPlace(table[name])
    match = _IN_LAYER.fullmatch(name)
    if match is None or match[2] not in table:
        raise ConfigError(f"tensor {name} has no place in a {architecture} model")
    layer, module, kind = match.groups()
    return HfPlace(
        name=f"{'transformer.h' if architecture == 'gpt2' else 'model.layers'}.{layer}.{table[module]}.{kind}",
        rope_heads=_ROPE_HEADS.get(module) if architecture == "llama" else None,
        is_transposed=architecture == "gpt2" and kind == "weight" and module in _GPT2_TURNED,
        is_stacked=module.endswith("_exps"),
        is_row=module == "ffn_gate_inp_shexp",
    )
