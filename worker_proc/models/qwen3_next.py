"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, and mixtures of experts."""

from collections.abc import Callable
from functools import partial

import torch

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import one_added, split_rows
from octavo.worker_proc.models.hf_config import optional, reject_unless, required, types_of_layers
from octavo.worker_proc.models.layers.attention import SelfAttention, head_norm
from octavo.worker_proc.models.layers.decoder import AttentionBlock, DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.experts import Experts, SharedExpert, num_experts, routing_rule
from octavo.worker_proc.models.layers.gated_delta_net import DeltaNetSizes, GatedDeltaNet, divided_projections
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

_NORMS_FROM_ONE = r"(layernorm|[qk]_norm)\.weight$|^norm\.weight$"


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, num_layers, head_dim = facts.hf_config, facts.num_layers, facts.head_dim
    reject_unless(config, "hidden_act", ["silu"])
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-6)
    has_bias = optional(config, "attention_bias", False)
    period = optional(config, "full_attention_interval", 4)
    implied = ["linear_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]
    types = types_of_layers(config, num_layers, ["linear_attention", "full_attention"], implied)
    shape, whole = AttentionShape(facts.num_heads, facts.num_kv_heads, head_dim, head_dim**-0.5), _sizes(facts)
    sizes = whole.of_rank(placement.sharding.size)
    # Each query head is followed by its gate.
    starts = [2 * head * head_dim for head in range(placement.sharding.whole_heads(facts)[0])]
    queries = {
        "q_proj": [range(start, start + head_dim) for start in starts],
        "gate_proj": [range(start + head_dim, start + 2 * head_dim) for start in starts],
    }
    rules = [one_added(_NORMS_FROM_ONE), split_rows("q_proj", queries), *divided_projections(whole)]
    parameters = llama_parameters(placement, ignored=[r"^mtp\."], rules=rules)

    def mixer(index: int, name: str) -> AttentionBlock:
        if types[index] == "linear_attention":
            return GatedDeltaNet(parameters, f"{name}.linear_attn", index, sizes, width, eps=eps)
        name = f"{name}.self_attn"
        norm = head_norm(parameters, name, head_dim, eps, dtype=torch.float32)
        return SelfAttention(
            parameters,
            name,
            index,
            shape,
            width,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            qk_norm=norm,
            has_gate=True,
        )

    return prenorm_decoder(
        facts,
        parameters,
        [shape if kind == "full_attention" else None for kind in types],
        mixer,
        _mlps(facts, parameters, width),
        eps=eps,
        states=[sizes.state if kind == "linear_attention" else None for kind in types],
        norm=partial(RMSNorm.new, parameters, width=width, eps=eps, dtype=torch.float32),
        rotaries=[rotary_from_config(config, head_dim, default_partial=0.25)],
    )


def _mlps(facts: ModelFacts, parameters: Parameters, width: int) -> Callable[[int, str], MlpBlock]:
    """Return a function that makes the mlp block of a layer, given its index and its name."""
    config = facts.hf_config
    rule = routing_rule(
        num_experts(config),
        optional(config, "num_experts_per_tok", 10),
        is_normalized=optional(config, "norm_topk_prob", True),
    )
    dense_layers: list[int] = optional(config, "mlp_only_layers", [])
    step, inner_width = optional(config, "decoder_sparse_step", 1), optional(config, "intermediate_size", 5632)
    expert_width, shared_width = (
        optional(config, key, 512) for key in ("moe_intermediate_size", "shared_expert_intermediate_size")
    )

    def mlp(index: int, name: str) -> MlpBlock:
        name = f"{name}.mlp"
        if index in dense_layers or (index + 1) % step:
            return GatedMlp(parameters, name, width, inner_width)
        return SharedExpert(
            Experts(parameters, name, rule, width, expert_width),
            GatedMlp(parameters, f"{name}.shared_expert", width, shared_width),
            Linear.new(parameters, f"{name}.shared_expert_gate", width, 1, bias=False),
        )

    return mlp


def _sizes(facts: ModelFacts) -> DeltaNetSizes:
    config = facts.hf_config
    sizes = DeltaNetSizes(
        num_key_heads=optional(config, "linear_num_key_heads", 16),
        num_value_heads=optional(config, "linear_num_value_heads", 32),
        key_dim=optional(config, "linear_key_head_dim", 128),
        value_dim=optional(config, "linear_value_head_dim", 128),
        conv_width=optional(config, "linear_conv_kernel_dim", 4),
    )
    if sizes.num_value_heads % sizes.num_key_heads:
        raise ConfigError(
            f"config.json: {sizes.num_value_heads} 'linear_num_value_heads' "
            f"for {sizes.num_key_heads} 'linear_num_key_heads'"
        )
    return sizes
