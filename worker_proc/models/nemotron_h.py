"""Nemotron-H: every layer is a single block: a state-space block, attention, an mlp or a mixture of experts."""

import math
from collections.abc import Callable
from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required, types_of_layers
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import (
    DecoderModel,
    MlpBlock,
    MlpLayer,
    SingleBlockLayer,
    build_decoder,
)
from octavo.worker_proc.models.layers.experts import ExpertNames, Experts, SharedExpert, grouped_sigmoid_rule
from octavo.worker_proc.models.layers.mamba2 import Mamba2Mixer, Mamba2Sizes, divided_projections
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

_NAMES = {
    r"^embeddings?\.": "embed_tokens.",
    r"^norm_f\.": "norm.",
    r"\.mixer\.up_proj\.": ".mixer.fc1.",
    r"\.mixer\.down_proj\.": ".mixer.fc2.",
    r"\.shared_experts\.up_proj\.": ".shared_experts.fc1.",
    r"\.shared_experts\.down_proj\.": ".shared_experts.fc2.",
}
_EXPERTS = ExpertNames(gate=None, stacked_gate_up="experts.up_proj")
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, width = facts.hf_config, required(facts.hf_config, "hidden_size", int)
    eps = optional(config, "layer_norm_epsilon", 1e-5)
    whole, types = _sizes(facts), _types(facts)
    sizes = whole.of_rank(placement.sharding.size)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5)
    has_bias, has_conv_bias = optional(config, "use_bias", False), optional(config, "use_conv_bias", True)
    # As in transformers, this key limits steps from below, not `time_step_limit`.
    dt_limits = optional(config, "time_step_min", 0.001), math.inf
    _reject_other_blocks(facts, placement)
    rules = [renamed(_NAMES), *divided_projections(whole)]
    parameters = Parameters(placement, prefixes=["backbone.", "model."], ignored=[r"^mtp\."], rules=rules)
    make_norm = partial(RMSNorm.new, parameters, width=width, eps=eps)
    mlps = _mlps(facts, parameters, width, has_experts="moe" in types)

    def layer(index: int, name: str) -> SingleBlockLayer | MlpLayer:
        norm, name = make_norm(f"{name}.norm"), f"{name}.mixer"
        if make := mlps.get(types[index]):
            return MlpLayer(norm, make(name))
        if types[index] == "full_attention":
            return SingleBlockLayer(norm, SelfAttention(parameters, name, index, shape, width, rotary=None))
        mixer = Mamba2Mixer(
            parameters,
            name,
            index,
            sizes,
            width,
            eps=eps,
            has_bias=has_bias,
            has_output_bias=has_bias,
            has_conv_bias=has_conv_bias,
            dt_limits=dt_limits,
        )
        return SingleBlockLayer(norm, mixer)

    shapes = [shape if kind == "full_attention" else None for kind in types]
    states = [sizes.state if kind == "linear_attention" else None for kind in types]
    return build_decoder(facts, parameters, shapes, layer, width=width, norm=make_norm, states=states)


def _mlps(
    facts: ModelFacts, parameters: Parameters, width: int, *, has_experts: bool
) -> dict[str, Callable[[str], MlpBlock]]:
    """Return a function that makes the block of a layer with an mlp or a mixture of experts, given its name."""
    config = facts.hf_config
    function = activation(config, "relu2", PLAIN, key="mlp_hidden_act")
    inner_width, has_bias = optional(config, "intermediate_size", 21504), optional(config, "mlp_bias", False)
    expert_width, shared_width = (
        optional(config, key, 7688) for key in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    ignore(config, "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob")
    ignore(config, "n_group", "topk_group", "moe_latent_size", "n_shared_experts", "moe_shared_expert_overlap")

    def mlp(name: str, inner_width: int = inner_width) -> Mlp:
        return Mlp(parameters, name, width, inner_width, activation=function, has_bias=has_bias)

    if not has_experts:
        return {"mlp": mlp}
    reject_unless(config, "mlp_hidden_act", ["relu2", None])
    latent_width = None if config.get("moe_latent_size") is None else required(config, "moe_latent_size", int)
    rule = grouped_sigmoid_rule({"n_routed_experts": 8, "num_experts_per_tok": 2, **config})

    def moe(name: str) -> SharedExpert:
        routed = Experts(
            parameters,
            name,
            rule,
            width,
            expert_width,
            names=_EXPERTS,
            activation="relu2",
            choice_bias="gate.e_score_correction_bias",
            latent_width=latent_width,
            has_latent_bias=has_bias,
        )
        return SharedExpert(routed, mlp(f"{name}.shared_experts", shared_width))

    return {"mlp": mlp, "moe": moe}


def _sizes(facts: ModelFacts) -> Mamba2Sizes:
    config = facts.hf_config
    sizes = Mamba2Sizes(
        num_heads=optional(config, "mamba_num_heads", 128),
        head_dim=optional(config, "mamba_head_dim", 64),
        state_size=optional(config, "ssm_state_size", 128),
        num_groups=optional(config, "n_groups", 8),
        conv_width=optional(config, "conv_kernel", 4),
    )
    if sizes.num_heads % sizes.num_groups:
        raise ConfigError(f"config.json: {sizes.num_heads} 'mamba_num_heads' for {sizes.num_groups} 'n_groups'")
    return sizes


def _types(facts: ModelFacts) -> list[str]:
    """Return the block type of each layer, which is a letter or a word in the configuration."""
    pattern = optional(facts.hf_config, "hybrid_override_pattern", "")
    return types_of_layers(
        facts.hf_config,
        facts.num_layers,
        ["linear_attention", "full_attention", "mlp", "moe"],
        [_LETTERS.get(letter, letter) for letter in pattern],
        key="layers_block_type",
        other_names={"mamba": "linear_attention", "attention": "full_attention"},
    )


def _reject_other_blocks(facts: ModelFacts, placement: Placement) -> None:
    """Reject configurations whose blocks differ from those that are built here."""
    config, (_, num_kv_heads) = facts.hf_config, placement.sharding.whole_heads(facts)
    reject_unless(config, "attention_bias", [False, None])
    reject_unless(config, "mamba_hidden_act", ["silu", "swish"])
    reject_unless(config, "mamba_proj_bias", [optional(config, "use_bias", False), None])
    reject_unless(config, "attention_head_dim", [facts.head_dim, None])
    reject_unless(config, "num_query_groups", [num_kv_heads, None])
    reject_unless(config, "sliding_window", [None])
    reject_unless(config, "mamba_ssm_cache_dtype", ["float32", None])
    # They concern layers that predict further tokens, the order of computation, and training.
    ignore(
        config,
        "num_nextn_predict_layers",
        "mtp_layers_block_type",
        "chunk_size",
        "expand",
        "use_mamba_kernels",
        "num_logits_to_keep",
        "residual_in_fp32",
    )
    ignore(config, "rescale_prenorm_residual", "rms_norm_eps", "time_step_rank", "time_step_max", "time_step_floor")
    ignore(config, "time_step_limit", "hidden_dropout")
