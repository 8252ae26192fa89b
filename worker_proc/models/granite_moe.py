"""Granite-MoE: Granite 3 with a mixture of experts in every layer."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.pointwise import scale
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.models.layers.experts import ExpertNames, Experts, num_experts, routing_rule
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.parallel.placement import Placement

_NAMES = ExpertNames(router="router.layer", stacked_gate_up="input_linear.weight", stacked_down="output_linear.weight")


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    reject_unless(config, "hidden_act", ["silu"])
    width, inner_width = required(config, "hidden_size", int), required(config, "intermediate_size", int)
    embedding_factor, residual_factor, score_factor, logits_divisor = (
        float(optional(config, key, 1.0))
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    has_bias = optional(config, "attention_bias", False)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, score_factor)
    # Softmax of the chosen experts' logits.
    rule = routing_rule(num_experts(config), optional(config, "num_experts_per_tok", 2))
    parameters = llama_parameters(facts, placement)
    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        lambda index, name: SelfAttention(
            parameters, f"{name}.self_attn", index, shape, width, has_qkv_bias=has_bias, has_output_bias=has_bias
        ),
        lambda _, name: Experts(parameters, f"{name}.block_sparse_moe", rule, width, inner_width, names=_NAMES),
        eps=optional(config, "rms_norm_eps", 1e-6),
        after_embedding=partial(scale, factor=embedding_factor),
        after_block=partial(scale, factor=residual_factor),
        after_output=partial(scale, factor=1.0 / logits_divisor),
    )
