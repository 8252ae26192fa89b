"""OLMoE: a mixture of experts in every layer, and norms over all query and key heads of a row."""

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.models.layers.experts import Experts, num_experts, routing_rule
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.row_norms import norms_of_rows
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "clip_qkv", [None])
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5)
    width, inner_width = required(config, "hidden_size", int), required(config, "intermediate_size", int)
    eps = optional(config, "rms_norm_eps", 1e-5)
    has_bias = optional(config, "attention_bias", False)
    rule = routing_rule(
        num_experts(config),
        required(config, "num_experts_per_tok", int),
        is_normalized=optional(config, "norm_topk_prob", False),
    )
    parameters = llama_parameters(placement)

    def attention(index: int, name: str) -> SelfAttention:
        block = f"{name}.self_attn"
        norms = norms_of_rows(parameters, block, shape, eps)
        return SelfAttention(
            parameters, block, index, shape, width, has_qkv_bias=has_bias, has_output_bias=has_bias, row_norms=norms
        )

    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        attention,
        lambda _, name: Experts(parameters, f"{name}.mlp", rule, width, inner_width),
        eps=eps,
    )
