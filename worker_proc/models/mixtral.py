"""Mixtral: Mistral with a mixture of experts in every layer."""

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import optional, reject_unless, required, window_of_all_layers
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.models.layers.experts import ExpertNames, Experts, num_experts, routing_rule
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.parallel.placement import Placement

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")
_MODULES = {r"\.mlp\.(gate|experts)\b": r".block_sparse_moe.\1"}
"""Adapters use the names of transformers 5; its checkpoints keep the earlier names."""


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "attention_bias", [False, None])
    window = window_of_all_layers(config)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5, window)
    width, inner_width = required(config, "hidden_size", int), required(config, "intermediate_size", int)
    rule = routing_rule(num_experts(config), optional(config, "num_experts_per_tok", 2))
    parameters = llama_parameters(placement, rules=[renamed(_MODULES)])
    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        lambda index, name: SelfAttention(parameters, f"{name}.self_attn", index, shape, width),
        lambda _, name: Experts(parameters, f"{name}.block_sparse_moe", rule, width, inner_width, names=_NAMES),
        eps=optional(config, "rms_norm_eps", 1e-5),
        rotaries=[rotary_from_config(config, facts.head_dim, default_theta=1000000.0)],
    )
