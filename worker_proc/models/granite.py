"""Granite 3, dense or with a mixture of experts: a Llama with factors of embeddings, scores, outputs and logits."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict

from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.pointwise import scale
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.experts import ExpertNames, Experts, num_experts, routing_rule
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

EXPERT_NAMES = ExpertNames(
    router="router.layer",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
    is_stacked=True,
)


class Factors(TypedDict):
    """Factors of the parts of a decoder: arguments of `prenorm_decoder`."""

    after_embedding: Callable[[Tensor], Tensor]
    after_block: Callable[[Tensor], Tensor]
    after_output: Callable[[Tensor], Tensor]


def factors(config: Mapping[str, Any]) -> tuple[float, Factors]:
    """Return the factor of the scores, and the factors of embeddings, block outputs and logits."""
    embedding, residual, score, divisor = (
        float(optional(config, key, 1.0))
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    others = Factors(
        after_embedding=partial(scale, factor=embedding),
        after_block=partial(scale, factor=residual),
        after_output=partial(scale, factor=1.0 / divisor),
    )
    return score, others


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    has_bias, width = optional(config, "attention_bias", False), required(config, "hidden_size", int)
    score_factor, others = factors(config)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, score_factor)
    parameters = llama_parameters(placement)
    mlps = _experts if facts.architecture == "GraniteMoeForCausalLM" else _dense
    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        lambda index, name: SelfAttention(
            parameters, f"{name}.self_attn", index, shape, width, has_qkv_bias=has_bias, has_output_bias=has_bias
        ),
        mlps(config, parameters, width),
        eps=optional(config, "rms_norm_eps", 1e-6),
        **others,
    )


def _dense(config: Mapping[str, Any], parameters: Parameters, width: int) -> Callable[[int, str], MlpBlock]:
    inner_width, function = required(config, "intermediate_size", int), activation(config, "silu", GATED)
    has_bias = optional(config, "mlp_bias", False)
    return lambda _, name: GatedMlp(
        parameters, f"{name}.mlp", width, inner_width, activation=function, has_bias=has_bias
    )


def _experts(config: Mapping[str, Any], parameters: Parameters, width: int) -> Callable[[int, str], MlpBlock]:
    reject_unless(config, "hidden_act", ["silu"])
    inner_width = required(config, "intermediate_size", int)
    # Softmax of the chosen experts' logits.
    rule = routing_rule(num_experts(config), optional(config, "num_experts_per_tok", 2))
    return lambda _, name: Experts(parameters, f"{name}.block_sparse_moe", rule, width, inner_width, names=EXPERT_NAMES)
