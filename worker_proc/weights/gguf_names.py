"""The place of each tensor of a GGUF file in the original checkpoint, as data.

GGUF's names are the same for all architectures; Hugging Face's differ by model. Source: the converter of llama.cpp.
"""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto

from octavo.protocol.errors import ConfigError


class Change(Enum):
    """How the converter changed a tensor."""

    NONE = auto()
    ROTARY_ROWS = auto()
    """Rows of the heads of queries or keys were interleaved for rotary embedding."""
    TRANSPOSED = auto()
    STACKED = auto()
    """The tensor holds a matrix or a bias of each expert; the name has {} for the expert's index."""
    ROW = auto()
    """The tensor is the only row of a matrix."""
    ONE_ADDED = auto()
    """The original is the difference from one."""
    QKV = auto()
    """Rows of queries, then keys, then values; the name has {} for the first letter of each."""
    KEY_PART = auto()
    """Latent attention: the rows of the keys of each head, transposed. The values are in another tensor."""
    UNSQUEEZED = auto()
    """The original has a dimension of one in the middle."""
    FLATTENED = auto()
    """The original has one dimension."""
    NEGATIVE_EXP = auto()
    """Decay of a recurrent state: the original is the logarithm of its negative, with one dimension."""
    VALUE_PART = auto()
    """Latent attention: the rows of the values of each head."""


@dataclass(frozen=True, slots=True)
class HfPlace:
    """Name in the original checkpoint, and how the converter changed the tensor."""

    name: str
    change: Change = Change.NONE


@dataclass(frozen=True, slots=True)
class _Table:
    """The names of an architecture, without "weight" or "bias" where both have the same rule."""

    layer: Mapping[str, str]
    top: Mapping[str, str]
    layers: str = "model.layers"
    """Common prefix of the names of all layers."""
    rotates_neighbours: bool = False
    """Whether the converter interleaved the rows of queries and keys."""
    one_added: bool = False
    """Whether norms are stored with one added."""


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _NORMS | _ATTENTION | _MLP
_FOUR_NORMS = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {name: place for name, place in _FOUR_NORMS.items() if name not in _NORMS}
_MIXTRAL = _LLAMA | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_QWEN_MOE = (
    _LLAMA
    | _EXPERTS
    | {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
_SHARED_EXPERTS = _EXPERTS | {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_GRANITE_MOE = _LLAMA | {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
}
_DEEPSEEK = (
    _LLAMA
    | _SHARED_EXPERTS
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.kv_b_proj",
        "attn_v_b": "self_attn.kv_b_proj",
    }
)
_GPT_OSS = (
    _LLAMA
    | _EXPERTS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        "attn_sinks.weight": "self_attn.sinks",
    }
)
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_MAMBA2 = {"attn_norm": "norm"} | {name: place.replace("mamba.", "mixer.") for name, place in _MAMBA.items()}
_MAMBA2_TOP = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_GRANITE_HYBRID = (
    _GRANITE_MOE
    | _MAMBA
    | {f"ffn_{part}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")}
    | {f"ffn_{part}_shexp": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")}
)
_LFM2 = _ATTENTION | {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_MOE = _LFM2 | {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_PHI = _LLAMA | {
    "attn_qkv": "self_attn.{}_proj",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_PHI3 = _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM = _LLAMA | {"attn_qkv": "self_attn.{}_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM4 = _GLM | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_GLM4_MOE = _LLAMA | _SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"}
_BLOOM = _NORMS | {
    "attn_qkv": "self_attention.{}_proj",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON = {name: place for name, place in _BLOOM.items() if name != "ffn_norm"}
_FALCON_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_NEOX = _BLOOM | {"attn_qkv": "attention.{}_proj", "attn_output": "attention.dense"}
_NEOX_TOP = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}
_MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_MPT_TOP = {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"}

_TABLES = {
    "llama": _Table(_MIXTRAL, _TOP, rotates_neighbours=True),  # Mixtral too is stored as llama
    "qwen2": _Table(_LLAMA, _TOP),
    "qwen3": _Table(_LLAMA, _TOP),
    "qwen2moe": _Table(_QWEN_MOE, _TOP),
    "qwen3moe": _Table(_QWEN_MOE, _TOP),
    "gpt2": _Table(_GPT2, _GPT2_TOP, "transformer.h"),
    "gemma": _Table(_LLAMA, _TOP, one_added=True),
    "gemma2": _Table(_FOUR_NORMS, _TOP, one_added=True),
    "gemma3": _Table(_FOUR_NORMS, _TOP, one_added=True),
    "granite": _Table(_LLAMA, _TOP, rotates_neighbours=True),
    "granitemoe": _Table(_GRANITE_MOE, _TOP, rotates_neighbours=True),
    "phi2": _Table(_PHI, _TOP | {"output_norm": "model.final_layernorm"}),
    "phi3": _Table(_PHI3, _TOP),
    "starcoder2": _Table(_LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, _TOP),
    "gptneox": _Table(_NEOX, _NEOX_TOP, "gpt_neox.layers"),
    "falcon": _Table(_FALCON, _FALCON_TOP, "transformer.h"),
    "falcon with two norms": _Table(
        _FALCON | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}, _FALCON_TOP, "transformer.h"
    ),
    "bloom": _Table(_BLOOM, _FALCON_TOP, "transformer.h"),
    "mpt": _Table(_MPT, _MPT_TOP, "transformer.blocks"),
    "command-r": _Table(_LLAMA, _TOP),
    "cohere2": _Table(_LLAMA, _TOP),
    "olmo": _Table(_LLAMA, _TOP, rotates_neighbours=True),
    "olmo2": _Table(_POST_NORMS, _TOP),
    "olmoe": _Table(_LLAMA | _EXPERTS, _TOP),
    "chatglm": _Table(_GLM, _TOP),
    "glm4": _Table(_GLM4, _TOP),
    "glm4moe": _Table(_GLM4_MOE, _TOP),
    "exaone4": _Table(_POST_NORMS, _TOP),
    "smollm3": _Table(_LLAMA, _TOP, rotates_neighbours=True),
    "arcee": _Table(_LLAMA, _TOP, rotates_neighbours=True),
    "internlm2": _Table(_LLAMA, _TOP, rotates_neighbours=True),
    "deepseek2": _Table(_DEEPSEEK, _TOP),
    "gpt-oss": _Table(_GPT_OSS, _TOP),
    "mamba2": _Table(_MAMBA2, _MAMBA2_TOP, "backbone.layers"),
    "granitehybrid": _Table(_GRANITE_HYBRID, _TOP, rotates_neighbours=True),
    "lfm2": _Table(_LFM2, _LFM2_TOP),
    "lfm2moe": _Table(_LFM2_MOE, _LFM2_TOP),
}

_STORED = {
    "gpt2": ("GPT2LMHeadModel",),
    "llama": (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
    ),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen2moe": ("Qwen2MoeForCausalLM",),
    "qwen3moe": ("Qwen3MoeForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "granite": ("GraniteForCausalLM",),
    "granitemoe": ("GraniteMoeForCausalLM",),
    "phi2": ("PhiForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "starcoder2": ("Starcoder2ForCausalLM",),
    "gptneox": ("GPTNeoXForCausalLM",),
    "falcon": ("FalconForCausalLM",),
    "bloom": ("BloomForCausalLM",),
    "mpt": ("MptForCausalLM",),
    "command-r": ("CohereForCausalLM",),
    "cohere2": ("Cohere2ForCausalLM",),
    "olmo": ("OlmoForCausalLM",),
    "olmo2": (
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
    ),
    "olmoe": ("OlmoeForCausalLM",),
    "chatglm": ("GlmForCausalLM",),
    "glm4": ("Glm4ForCausalLM",),
    "glm4moe": ("Glm4MoeForCausalLM",),
    "exaone4": ("Exaone4ForCausalLM",),
    "smollm3": ("SmolLM3ForCausalLM",),
    "arcee": ("ArceeForCausalLM",),
    "internlm2": ("InternLM2ForCausalLM",),
    "deepseek2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
    ),
    "gpt-oss": ("GptOssForCausalLM",),
    "mamba2": ("Mamba2ForCausalLM",),
    "granitehybrid": ("GraniteMoeHybridForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM",),
    "lfm2moe": ("Lfm2MoeForCausalLM",),
}
"""Architectures of `config.json`, by the file's architecture; "llama" includes Mistral and Mixtral, "olmo2" OLMo 3."""

SUPPORTED_ARCHITECTURES = frozenset(name for names in _STORED.values() for name in names)
"""Architectures of `config.json` whose GGUF files can be read."""

_CHANGES = {
    "ffn_gate_inp_shexp": Change.ROW,
    "attn_k_b": Change.KEY_PART,
    "attn_v_b": Change.VALUE_PART,
    "ssm_a": Change.NEGATIVE_EXP,
    "ssm_d": Change.FLATTENED,
    "ssm_norm": Change.FLATTENED,
}
"""Changes by module, in every architecture."""
_ROTARY = frozenset({"attn_q", "attn_k"})

# GPT-2 checkpoints hold (inputs, outputs) matrices, which the converter transposes.
_GPT2_TURNED = frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})

# The factors of scaled rotary embedding are read with the metadata, when the model's config is built.
_ROPE_FACTORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})

_IN_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")


class HfPlaces:
    """The places of the tensors of one file.

    Args:
        architecture: `general.architecture`.
        tensor_names: names of all tensors of the file.
        num_layers: number of layers of the model, if the file has more layers, which predict further tokens and are
            left out.

    Raises:
        ConfigError: the architecture is unknown.
    """

    def __init__(self, architecture: str, tensor_names: Set[str], num_layers: int | None = None) -> None:
        if architecture not in _TABLES:
            raise ConfigError(
                f"GGUF architecture {architecture!r} is not supported",
                hint="supported: " + ", ".join(name for name in sorted(_TABLES) if " " not in name),
            )
        has_two_norms = architecture == "falcon" and "blk.0.attn_norm_2.weight" in tensor_names
        self._architecture = architecture
        self._table = _TABLES["falcon with two norms" if has_two_norms else architecture]
        self._num_layers = num_layers

    def of(self, name: str) -> HfPlace | None:
        """Return the place of a tensor; `None` if it is not a needed weight of the original checkpoint.

        Raises:
            ConfigError: the tensor is unknown within the architecture.
        """
        if name in _ROPE_FACTORS:
            return None
        module, _, kind = name.rpartition(".")
        if module in self._table.top:
            return HfPlace(f"{self._table.top[module]}.{kind}", self._change(module, kind))
        match = _IN_LAYER.fullmatch(name)
        if match is not None and self._num_layers is not None and int(match[1]) >= self._num_layers:
            return None
        own = match and (self._table.layer.get(f"{match[2]}.{match[3]}") or self._table.layer.get(match[2]))
        if not match or not own:
            raise ConfigError(f"tensor {name} has no place in a {self._architecture} model")
        layer, module, kind = match[1], match[2], match[3] or ""
        has_own_kind = not kind or f"{module}.{kind}" in self._table.layer
        full = f"{self._table.layers}.{layer}.{own}" + ("" if has_own_kind else f".{kind}")
        return HfPlace(full, self._change(module, kind, own))

    def _change(self, module: str, kind: str, own: str = "") -> Change:
        if module in ("ssm_conv1d", "shortconv.conv") and kind == "weight":
            return Change.UNSQUEEZED
        if module in _CHANGES:
            return _CHANGES[module]
        if "{}" in own:
            return Change.QKV if module == "attn_qkv" else Change.STACKED
        if self._table.rotates_neighbours and module in _ROTARY:
            return Change.ROTARY_ROWS
        if self._table.one_added and module.endswith("norm"):
            return Change.ONE_ADDED
        if self._architecture == "gpt2" and kind == "weight" and module in _GPT2_TURNED:
            return Change.TRANSPOSED
        return Change.NONE
