"""Falcon-H1: a state-space block and attention in parallel in every layer, and factors of nearly everything."""

import math
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.pointwise import scale
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import ignore, limits, optional, reject_unless, required
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import AttentionBlock, DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.mamba2 import Mamba2Factors, Mamba2Mixer, Mamba2Sizes, divided_projections
from octavo.worker_proc.models.layers.mamba2_config import sizes_from_config
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

_NAMES = {
    r"\.feed_forward\.": ".mlp.",
    r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
    r"^final_layernorm\.": "norm.",
}


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two blocks that read the same rows, each with a factor of its input and of its output. The outputs are added."""

    parts: tuple[tuple[AttentionBlock, float, float], ...]

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        first_TD, second_TD = (
            _scaled(block(_scaled(x_TD, before), tables, attention), after) for block, before, after in self.parts
        )
        return first_TD + second_TD


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, width, eps = facts.hf_config, required(facts.hf_config, "hidden_size", int), _eps(facts)
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "mamba_use_mlp", [True, None])
    ignore(config, "num_logits_to_keep", "mlp_expansion_factor", "attn_layer_indices")
    inner_width = required(config, "intermediate_size", int)
    whole = sizes_from_config(config, _inner_width_of_mamba(facts, width))
    sizes = whole.of_rank(placement.sharding.size)
    has_bias = optional(config, "attention_bias", False)
    gate_factor, down_factor = _factors(facts, "mlp_multipliers", 2)
    # The factor of the keys is applied to the scores.
    score_factor = _factor(facts, "key_multiplier") * facts.head_dim**-0.5
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, score_factor)
    parameters = llama_parameters(placement, rules=[renamed(_NAMES), *divided_projections(whole)])

    def mixer(index: int, name: str) -> SideBySide:
        attention = SelfAttention(
            parameters, f"{name}.self_attn", index, shape, width, has_qkv_bias=has_bias, has_output_bias=has_bias
        )
        mamba = _mamba(facts, parameters, f"{name}.mamba", index, sizes, width, eps)
        return SideBySide(
            (
                (mamba, _factor(facts, "ssm_in_multiplier"), _factor(facts, "ssm_out_multiplier")),
                (attention, _factor(facts, "attention_in_multiplier"), _factor(facts, "attention_out_multiplier")),
            )
        )

    def mlp(index: int, name: str) -> MlpBlock:
        has_mlp_bias = optional(config, "mlp_bias", False)
        block = GatedMlp(parameters, f"{name}.mlp", width, inner_width, has_bias=has_mlp_bias, gate_factor=gate_factor)
        return lambda x_TD: _scaled(block(x_TD), down_factor)

    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        mixer,
        mlp,
        eps=eps,
        states=[sizes.state] * facts.num_layers,
        after_embedding=partial(scale, factor=_factor(facts, "embedding_multiplier")),
        after_output=partial(scale, factor=_factor(facts, "lm_head_multiplier")),
        is_embedding_scaled=True,
    )


def _mamba(
    facts: ModelFacts, parameters: Parameters, name: str, index: int, sizes: Mamba2Sizes, width: int, eps: float
) -> Mamba2Mixer:
    config = facts.hf_config
    is_norm_first, has_norm = (
        optional(config, key, default) for key, default in (("mamba_norm_before_gate", True), ("mamba_rms_norm", False))
    )
    return Mamba2Mixer(
        parameters,
        name,
        index,
        sizes,
        width,
        eps=eps,
        norm=None if not has_norm else "norm_first" if is_norm_first else "gate_first",
        has_bias=optional(config, "mamba_proj_bias", False),
        has_output_bias=optional(config, "projectors_bias", False),
        has_conv_bias=optional(config, "mamba_conv_bias", True),
        dt_limits=limits(config, "time_step_limit", (0.0, math.inf)),
        factors=Mamba2Factors(*_factors(facts, "ssm_multipliers", 5)),
    )


def _inner_width_of_mamba(facts: ModelFacts, width: int) -> int:
    expansion = optional(facts.hf_config, "mamba_expand", 2)
    given = facts.hf_config.get("mamba_d_ssm", 1024)
    return expansion * width if given is None else int(given)


def _factor(facts: ModelFacts, key: str) -> float:
    return optional(facts.hf_config, key, 1.0)


def _factors(facts: ModelFacts, key: str, count: int) -> list[float]:
    factors: list[float] = optional(facts.hf_config, key, [1.0] * count)
    if len(factors) != count:
        raise ConfigError(f"config.json: {key!r} has {len(factors)} numbers; expected {count}")
    return factors


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else scale(x, factor)


def _eps(facts: ModelFacts) -> float:
    return optional(facts.hf_config, "rms_norm_eps", 1e-5)
