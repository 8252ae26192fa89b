"""DeepSeek-V2 and V3: multi-head latent attention, grouped experts, and shared experts."""

import math
from collections.abc import Mapping
from typing import Any

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.latent_heads import LatentWidths
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.routing import RoutingRule
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required
from octavo.worker_proc.models.layers.decoder import DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.experts import (
    Experts,
    SharedExpert,
    grouped_sigmoid_rule,
    num_experts,
    routing_rule,
)
from octavo.worker_proc.models.layers.latent_attention import LatentAttention
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the member of the family that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, is_v2 = facts.hf_config, facts.architecture == "DeepseekV2ForCausalLM"
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "moe_layer_freq", [1])
    reject_unless(config, "mlp_bias", [False])
    ignore(config, "qk_head_dim", "n_group", "topk_group", "ep_size", "aux_loss_alpha", "seq_aux", "intermediate_size")
    width = required(config, "hidden_size", int)
    widths = _widths(config, is_interleaved=is_v2 or optional(config, "rope_interleave", True))
    shape = AttentionShape(facts.num_heads, 1, widths.key, _scale(config, widths), key_value_dim=widths.latent)
    rule = _v2_rule(config) if is_v2 else grouped_sigmoid_rule(config, scale=2.5, num_groups=8, num_kept_groups=4)
    inner_width = required(config, "moe_intermediate_size", int)
    num_shared: int = config.get("n_shared_experts", 2 if is_v2 else 1) or 0
    num_dense = optional(config, "first_k_dense_replace", 0 if is_v2 else 3)
    # Layers after the last one predict further tokens, for speculative decoding.
    extra = range(facts.num_layers, facts.num_layers + optional(config, "num_nextn_predict_layers", 0))
    parameters = llama_parameters(placement, ignored=[rf"^layers\.{layer}\." for layer in extra])

    def attention(index: int, name: str) -> LatentAttention:
        return LatentAttention(
            parameters,
            f"{name}.self_attn",
            index,
            widths,
            facts.num_heads,
            width,
            query_rank=config.get("q_lora_rank"),
            has_bias=optional(config, "attention_bias", False),
        )

    def mlp(index: int, name: str) -> MlpBlock:
        block = f"{name}.mlp"
        if index < num_dense:
            return GatedMlp(parameters, block, width, required(config, "intermediate_size", int))
        choice_bias = None if is_v2 else "gate.e_score_correction_bias"
        routed = Experts(parameters, block, rule, width, inner_width, choice_bias=choice_bias)
        if not num_shared:
            return routed
        return SharedExpert(routed, GatedMlp(parameters, f"{block}.shared_experts", width, num_shared * inner_width))

    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        attention,
        mlp,
        eps=optional(config, "rms_norm_eps", 1e-6),
        rotaries=[rotary_from_config(config, widths.rotary)],
    )


def _widths(config: Mapping[str, Any], *, is_interleaved: bool) -> LatentWidths:
    rotary, plain, value = (required(config, f"{part}_head_dim", int) for part in ("qk_rope", "qk_nope", "v"))
    try:
        return LatentWidths(rotary, plain, value, required(config, "kv_lora_rank", int), is_interleaved)
    except ShapeError as error:
        raise ConfigError(f"config.json: {error}") from error


def _v2_rule(config: Mapping[str, Any]) -> RoutingRule:
    reject_unless(config, "scoring_func", ["softmax"])
    reject_unless(config, "topk_method", ["greedy", "group_limited_greedy"])
    reject_unless(config, "norm_topk_prob", [False, None])
    is_limited = config.get("topk_method") == "group_limited_greedy"
    return routing_rule(
        num_experts(config),
        required(config, "num_experts_per_tok", int),
        is_normalized=False,
        scale=float(optional(config, "routed_scaling_factor", 1.0)),
        num_groups=optional(config, "n_group", 1) if is_limited else 1,
        num_kept_groups=optional(config, "topk_group", 1) if is_limited else 1,
    )


def _scale(config: Mapping[str, Any], widths: LatentWidths) -> float:
    """Return the factor of the scores: YaRN raises it with the length (arXiv 2405.04434, appendix B)."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope |= optional(config, key, {})
    scale, all_dims = 1.0 / math.sqrt(widths.query), float(rope.get("mscale_all_dim") or 0.0)
    if (rope.get("rope_type") or rope.get("type") or "default") == "default" or not all_dims:
        return scale
    factor = required(rope, "factor", float)
    magnitude = 1.0 if factor <= 1.0 else 0.1 * all_dims * math.log(factor) + 1.0
    return scale * magnitude * magnitude
