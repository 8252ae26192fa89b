"""Llama 4 (text): layers that attend within chunks of positions, full layers without rotation, mixtures of experts."""

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import halves_of_pairs, reordered_rows
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required, types_of_layers
from octavo.worker_proc.models.layers.attention import SelfAttention, unweighted_norm
from octavo.worker_proc.models.layers.decoder import DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.experts import ExpertNames, Experts, SharedExpert, num_experts, routing_rule
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.query_scale import QueryScale
from octavo.worker_proc.models.layers.rotary import Rotary, rotary_from_config
from octavo.worker_proc.parallel.placement import Placement

_NAMES = ExpertNames(router="router", is_turned=True, is_stacked=True)


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "num_experts_per_tok", [1])
    ignore(config, "for_llm_compressor")
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-5)
    inner_width, dense_width = (
        optional(config, "intermediate_size", 8192),
        optional(config, "intermediate_size_mlp", 16384),
    )
    rotates, moe_layers = _rotates(facts), _moe_layers(facts)
    chunks = _chunks(facts, rotates)
    rotary = rotary_from_config(config, facts.head_dim, default_theta=500000.0)
    has_norm, has_bias = _has_norm(facts, rotary), optional(config, "attention_bias", False)
    query_scale = _query_scale(facts)
    heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
    shapes = [AttentionShape(*heads, facts.head_dim**-0.5, chunk, is_chunked=chunk is not None) for chunk in chunks]
    # The weight of the only expert is 1. Logits select it: sigmoids close to 1 would be equal.
    rule = routing_rule(num_experts(config), 1)
    input_rule = routing_rule(rule.num_experts, 1, score="sigmoid", is_normalized=False)
    rules = [
        reordered_rows(rf"\.{part}_proj\.", halves_of_pairs(count, facts.head_dim, facts.head_dim))
        for part, count in zip("qk", placement.sharding.whole_heads(facts), strict=True)
    ]
    parameters = llama_parameters(placement, rules=rules)

    def attention(index: int, name: str) -> SelfAttention:
        return SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shapes[index],
            width,
            rotary=0 if rotates[index] else None,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            # Before the rotation, which does not change lengths.
            qk_norm=unweighted_norm(parameters, facts.head_dim, eps) if has_norm and rotates[index] else None,
            has_query_scale=query_scale is not None and not rotates[index],
        )

    def mlp(index: int, name: str) -> MlpBlock:
        block = f"{name}.feed_forward"
        if index not in moe_layers:
            return GatedMlp(parameters, block, width, dense_width)
        routed = Experts(parameters, block, rule, width, inner_width, names=_NAMES, input_rule=input_rule)
        return SharedExpert(routed, GatedMlp(parameters, f"{block}.shared_expert", width, inner_width))

    return prenorm_decoder(
        facts, parameters, shapes, attention, mlp, eps=eps, rotaries=[rotary], query_scale=query_scale
    )


def _rotates(facts: ModelFacts) -> list[bool]:
    """Return which layers rotate queries and keys; by default all but every fourth."""
    config, num_layers = facts.hf_config, facts.num_layers
    period = optional(config, "no_rope_layer_interval", 4)
    given: list[int] = optional(config, "no_rope_layers", [])  # 1 means that the layer rotates, in spite of the name
    rotates = given or [int((layer + 1) % period != 0) for layer in range(num_layers)]
    if len(rotates) < num_layers:
        raise ConfigError(f"config.json: {len(rotates)} 'no_rope_layers' for {num_layers} layers")
    return [bool(number) for number in rotates[:num_layers]]


def _moe_layers(facts: ModelFacts) -> frozenset[int]:
    """Return the layers that are mixtures of experts."""
    step = optional(facts.hf_config, "interleave_moe_layer_step", 1)
    if step < 1:
        raise ConfigError(f"config.json: 'interleave_moe_layer_step' is {step}; expected a positive integer")
    return frozenset(optional(facts.hf_config, "moe_layers", list(range(step - 1, facts.num_layers, step))))


def _chunks(facts: ModelFacts, rotates: list[bool]) -> list[int | None]:
    """Return the size of a chunk of positions in each layer; `None` if the layer attends to all positions."""
    config = facts.hf_config
    chunk = config.get("attention_chunk_size", 8192)
    is_chunked = [is_rotated and chunk is not None for is_rotated in rotates]
    implied = ["chunked_attention" if is_in_chunks else "full_attention" for is_in_chunks in is_chunked]
    types = types_of_layers(config, facts.num_layers, ["full_attention", "chunked_attention"], implied)
    if "chunked_attention" in types and (type(chunk) is not int or chunk < 1):
        raise ConfigError(f"config.json: 'attention_chunk_size' is {chunk!r}; expected a positive integer")
    return [chunk if kind == "chunked_attention" else None for kind in types]


def _has_norm(facts: ModelFacts, rotary: Rotary) -> bool:
    """Return whether rotated heads of queries and keys are normalized."""
    has_norm = optional(facts.hf_config, "use_qk_norm", True)
    if has_norm and rotary.magnitude != 1.0:
        raise ConfigError(
            f"config.json: the rope scaling multiplies queries and keys by {rotary.magnitude:.4g}, and 'use_qk_norm' "
            "normalizes them afterwards, which is not supported",
            hint="use the rope scaling 'llama3', as published models of Llama 4 do",
        )
    return has_norm


def _query_scale(facts: ModelFacts) -> QueryScale | None:
    """Return the factors of unrotated queries; published configurations write the number 4 for true."""
    floor, factor = optional(facts.hf_config, "floor_scale", 8192), optional(facts.hf_config, "attn_scale", 0.1)
    if not facts.hf_config.get("attn_temperature_tuning", True):
        return None
    if floor < 1:
        raise ConfigError(f"config.json: 'floor_scale' is {floor}; expected a positive number")
    return QueryScale(floor, factor)
