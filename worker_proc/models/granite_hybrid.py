"""Granite 4: state-space blocks in most layers and attention in the others, with or without mixtures of experts."""

import math
from collections.abc import Callable, Sequence

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import renamed, split_rows, stacked
from octavo.worker_proc.models.granite import EXPERT_NAMES, factors
from octavo.worker_proc.models.hf_config import ignore, limits, optional, reject_unless, required, types_of_layers
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import AttentionBlock, DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.experts import Experts, SharedExpert, routing_rule
from octavo.worker_proc.models.layers.mamba2 import Mamba2Mixer, Mamba2Sizes, divided_projections
from octavo.worker_proc.models.layers.mamba2_config import sizes_from_config
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

_NAMES = {r"shared_mlp\.input_linear": "shared_mlp.gate_up_proj", r"shared_mlp\.output_linear": "shared_mlp.down_proj"}
_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, num_layers = facts.hf_config, facts.num_layers
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "position_embedding_type", [None, "nope", "rope"])
    reject_unless(config, "normalization_function", [None, "rmsnorm"])
    has_rotary = config.get("position_embedding_type") == "rope"
    ignore(config, "rope_theta", "rope_scaling", "rope_parameters")
    width, eps = required(config, "hidden_size", int), _eps(facts)
    inner_width, shared_width = (
        optional(config, key, default)
        for key, default in (("intermediate_size", 11008), ("shared_intermediate_size", 1024))
    )
    score_factor, others = factors(config)
    types = types_of_layers(
        config, num_layers, sorted(_TYPES.values()), ["linear_attention"] * num_layers, other_names=_TYPES
    )
    whole = sizes_from_config(config, optional(config, "mamba_expand", 2) * width)
    sizes = whole.of_rank(placement.sharding.size)
    num_experts, top_k = optional(config, "num_local_experts", 8), optional(config, "num_experts_per_tok", 2)
    whole_width = shared_width * placement.sharding.size
    parts = split_rows("gate_up_proj", stacked({"gate_proj": whole_width, "up_proj": whole_width}))
    parameters = llama_parameters(placement, rules=[renamed(_NAMES), parts, *divided_projections(whole)])

    def mlp(index: int, name: str) -> MlpBlock:
        shared = GatedMlp(parameters, f"{name}.shared_mlp", width, shared_width)
        if not num_experts:
            return shared
        rule = routing_rule(num_experts, top_k)  # softmax of the chosen experts' logits
        routed = Experts(parameters, f"{name}.block_sparse_moe", rule, width, inner_width, names=EXPERT_NAMES)
        return SharedExpert(routed, shared)

    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, score_factor)
    return prenorm_decoder(
        facts,
        parameters,
        [shape if kind == "full_attention" else None for kind in types],
        _mixers(facts, parameters, shape, sizes, types),
        mlp,
        eps=eps,
        states=[sizes.state if kind == "linear_attention" else None for kind in types],
        rotaries=[rotary_from_config(config, facts.head_dim)] if has_rotary else [],
        **others,
    )


def _mixers(
    facts: ModelFacts, parameters: Parameters, shape: AttentionShape, sizes: Mamba2Sizes, types: Sequence[str]
) -> Callable[[int, str], AttentionBlock]:
    """Return a function that makes the first block of a layer, given its index and its name."""
    config, width, eps = facts.hf_config, required(facts.hf_config, "hidden_size", int), _eps(facts)
    has_rotary = config.get("position_embedding_type") == "rope"
    has_bias, has_mamba_bias = (optional(config, key, False) for key in ("attention_bias", "mamba_proj_bias"))
    has_conv_bias = optional(config, "mamba_conv_bias", True)
    dt_limits = limits(config, "time_step_limit", (0.0, math.inf))

    def mixer(index: int, name: str) -> AttentionBlock:
        if types[index] == "full_attention":
            return SelfAttention(
                parameters,
                f"{name}.self_attn",
                index,
                shape,
                width,
                rotary=0 if has_rotary else None,
                has_qkv_bias=has_bias,
                has_output_bias=has_bias,
            )
        return Mamba2Mixer(
            parameters,
            f"{name}.mamba",
            index,
            sizes,
            width,
            eps=eps,
            has_bias=has_mamba_bias,
            has_output_bias=has_mamba_bias,
            has_conv_bias=has_conv_bias,
            dt_limits=dt_limits,
        )

    return mixer


def _eps(facts: ModelFacts) -> float:
    return optional(facts.hf_config, "rms_norm_eps", 1e-6)
