"""Command R, R+ and R7B (Cohere, Cohere2): parallel blocks, neighbours that rotate together, scaled logits."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.pointwise import scale
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import flattened, halves_of_pairs, reordered_rows
from octavo.worker_proc.models.hf_config import (
    full_attention_every,
    optional,
    reject_unless,
    required,
    windows_of_layers,
)
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, ParallelLayer, build_decoder
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.prenorm import llama_parameters
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.layers.row_norms import layer_norms_of_heads
from octavo.worker_proc.parallel.placement import Placement

_ONLY = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_parallel_embedding": False,
    "use_embedding_sharing": True,
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "layer_switch": 4,
}
"""Keys of published configurations, with the only values that are supported."""


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, is_second = facts.hf_config, facts.architecture == "Cohere2ForCausalLM"
    for key, only in _ONLY.items():
        reject_unless(config, key, [only, None])
    has_bias = optional(config, "attention_bias", False)
    width, eps = required(config, "hidden_size", int), optional(config, "layer_norm_eps", 1e-5)
    inner_width, function = required(config, "intermediate_size", int), activation(config, "silu", GATED)
    windows: list[int | None] = [None] * facts.num_layers
    if is_second:
        period, window = optional(config, "sliding_window_pattern", 4), config.get("sliding_window", 4096)
        windows = windows_of_layers(config, facts.num_layers, window, full_attention_every(period, facts.num_layers))
    heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
    shapes = [AttentionShape(*heads, facts.head_dim**-0.5, window) for window in windows]
    if is_second:
        reject_unless(config, "use_qk_norm", [False, None])
    has_norms = optional(config, "use_qk_norm", False)
    rules = [flattened(r"\.[qk]_norm\.")] + [
        reordered_rows(rf"\.{part}_(proj|norm)\.", halves_of_pairs(count, facts.head_dim, facts.head_dim))
        for part, count in zip("qk", placement.sharding.whole_heads(facts), strict=True)
    ]
    parameters = llama_parameters(placement, rules=rules)
    norm = partial(LayerNorm.new, parameters, width=width, eps=eps, has_bias=False)

    def layer(index: int, name: str) -> ParallelLayer:
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shapes[index],
            width,
            rotary=None if is_second and windows[index] is None else 0,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            row_norms=(
                layer_norms_of_heads(parameters, f"{name}.self_attn", shapes[index], eps) if has_norms else None
            ),
        )
        attention_norm = norm(f"{name}.input_layernorm")
        mlp = GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function)
        return ParallelLayer(attention_norm, attention, None, mlp)

    return build_decoder(
        facts,
        parameters,
        shapes,
        layer,
        width=width,
        norm=norm,
        is_tied=optional(config, "tie_word_embeddings", True),
        rotaries=[rotary_from_config(config, facts.head_dim, default_theta=10000.0 if is_second else 500000.0)],
        after_output=partial(scale, factor=optional(config, "logit_scale", 0.0625)),
    )
