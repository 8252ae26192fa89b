"""LFM2 and LFM2-MoE: short convolutions in most layers, attention in the others."""

from collections.abc import Mapping
from typing import Any

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.division import lfm2_inner_width
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required, types_of_layers
from octavo.worker_proc.models.layers.attention import SelfAttention, head_norm
from octavo.worker_proc.models.layers.decoder import AttentionBlock, DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.experts import Experts, num_experts, routing_rule
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.layers.short_conv import ShortConv, short_conv_state
from octavo.worker_proc.parallel.placement import Placement

_NAMES = {
    r"feed_forward\.": "mlp.",
    r"\.w1\.": ".gate_proj.",
    r"\.w3\.": ".up_proj.",
    r"\.w2\.": ".down_proj.",
    r"self_attn\.out_proj": "self_attn.o_proj",
    r"\.([qk])_layernorm": r".\1_norm",
    r"operator_norm": "input_layernorm",
    r"ffn_norm": "post_attention_layernorm",
    r"^embedding_norm": "norm",
}


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the member of the family that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, is_moe = facts.hf_config, facts.architecture == "Lfm2MoeForCausalLM"
    width, eps = required(config, "hidden_size", int), optional(config, "norm_eps", 1e-5)
    _reject_other_blocks(config, facts, placement, eps)
    is_tied = optional(config, "tie_embedding", optional(config, "tie_word_embeddings", True))
    conv_width, has_conv_bias = optional(config, "conv_L_cache", 3), optional(config, "conv_bias", False)
    attention_layers: list[int] = optional(config, "full_attn_idxs", list(range(facts.num_layers)))
    implied = ["full_attention" if index in attention_layers else "conv" for index in range(facts.num_layers)]
    types = types_of_layers(config, facts.num_layers, ["conv", "full_attention"], implied)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5)
    state = short_conv_state(width // placement.sharding.size, conv_width)
    parameters = llama_parameters(placement, rules=[renamed(_NAMES)])
    inner_width = required(config, "intermediate_size", int) if is_moe else lfm2_inner_width(config)
    num_dense = optional(config, "num_dense_layers", 2) if is_moe else facts.num_layers
    if is_moe:
        expert_width = required(config, "moe_intermediate_size", int)
        choice_bias = "expert_bias" if optional(config, "use_expert_bias", True) else None
        rule = routing_rule(
            num_experts(config),
            optional(config, "num_experts_per_tok", 4),
            score="sigmoid",
            is_normalized=optional(config, "norm_topk_prob", True),
            sum_offset=1e-6,
            scale=float(optional(config, "routed_scaling_factor", 1.0)),
        )

    def mixer(index: int, name: str) -> AttentionBlock:
        if types[index] == "conv":
            return ShortConv(parameters, f"{name}.conv", index, width, conv_width, has_bias=has_conv_bias)
        norm = head_norm(parameters, f"{name}.self_attn", facts.head_dim, eps)
        return SelfAttention(parameters, f"{name}.self_attn", index, shape, width, qk_norm=norm)

    def mlp(index: int, name: str) -> MlpBlock:
        if index < num_dense:
            return GatedMlp(parameters, f"{name}.mlp", width, inner_width)
        return Experts(parameters, f"{name}.mlp", rule, width, expert_width, choice_bias=choice_bias)

    return prenorm_decoder(
        facts,
        parameters,
        [shape if kind == "full_attention" else None for kind in types],
        mixer,
        mlp,
        eps=eps,
        states=[state if kind == "conv" else None for kind in types],
        is_tied=is_tied,
        rotaries=[rotary_from_config(config, facts.head_dim, default_theta=1e6)],
    )


def _reject_other_blocks(config: Mapping[str, Any], facts: ModelFacts, placement: Placement, eps: float) -> None:
    """Reject configurations whose blocks differ from those that are built here."""
    width, (num_heads, _) = required(config, "hidden_size", int), placement.sharding.whole_heads(facts)
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        reject_unless(config, key, [width, None])
    reject_unless(config, "block_norm_eps", [eps, None])
    reject_unless(config, "num_heads", [num_heads, None])
    reject_unless(config, "block_use_swiglu", [True, None])
    reject_unless(config, "use_pos_enc", [True, None])
    ignore(config, "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
