"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, LongRoPE, and heads that are rotated in part."""

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import split_rows, stacked, stacked_qkv
from octavo.worker_proc.models.hf_config import optional, reject_unless, required, window_of_all_layers
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    reject_unless(config, "attention_bias", [False])
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-5)
    inner_width = required(config, "intermediate_size", int)
    whole_heads, whole_width = placement.sharding.whole_heads(facts), inner_width * placement.sharding.size
    function = activation(config, "silu", GATED)
    window = window_of_all_layers(config)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5, window)
    rules = [
        split_rows("qkv_proj", stacked_qkv(*whole_heads, facts.head_dim)),
        split_rows("gate_up_proj", stacked({"gate_proj": whole_width, "up_proj": whole_width})),
    ]
    parameters = llama_parameters(placement, rules=rules)
    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        lambda index, name: SelfAttention(parameters, f"{name}.self_attn", index, shape, width),
        lambda _, name: GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function),
        eps=eps,
    )
