"""GPT-OSS: mixtures of experts with biases, attention sinks, and windows of every other layer."""

from octavo.kernels.experts.reference import SWIGLU_ALPHA, SWIGLU_LIMIT
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.hf_config import (
    full_attention_every,
    ignore,
    optional,
    reject_unless,
    required,
    windows_of_layers,
)
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.models.layers.experts import ExpertNames, Experts, num_experts, routing_rule
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.parallel.placement import Placement

_NAMES = ExpertNames(router="router", is_turned=True, is_alternating=True, is_stacked=True)


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "swiglu_alpha", [SWIGLU_ALPHA])
    reject_unless(config, "swiglu_limit", [SWIGLU_LIMIT])
    ignore(config, "initial_context_length")  # the same as original_max_position_embeddings of the rope scaling
    window = config.get("sliding_window", 128)
    windows = windows_of_layers(config, facts.num_layers, window, full_attention_every(2, facts.num_layers))
    heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
    shapes = [AttentionShape(*heads, facts.head_dim**-0.5, window) for window in windows]
    width, inner_width = required(config, "hidden_size", int), required(config, "intermediate_size", int)
    has_bias = optional(config, "attention_bias", True)
    # Softmax of the chosen experts' logits. `experts_per_token` is another name of the same number.
    top_k = optional(config, "num_experts_per_tok", optional(config, "experts_per_token", 4))
    rule = routing_rule(num_experts(config), top_k)
    parameters = llama_parameters(placement)
    return prenorm_decoder(
        facts,
        parameters,
        shapes,
        lambda index, name: SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shapes[index],
            width,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_sinks=True,
        ),
        lambda _, name: Experts(
            parameters,
            f"{name}.mlp",
            rule,
            width,
            inner_width,
            names=_NAMES,
            activation="clamped_swiglu",
            has_router_bias=True,
            has_bias=True,
        ),
        eps=optional(config, "rms_norm_eps", 1e-5),
        rotaries=[rotary_from_config(config, facts.head_dim, default_theta=150000.0)],
    )
