"""Falcon and BLOOM: ALiBi or rotary embedding, fused projections, layer norms; blocks of most Falcons are parallel."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.base import Layer
from octavo.worker_proc.models.checkpoint import grouped_qkv, renamed, split_rows
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.alibi import alibi_slopes, of_rank
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, ParallelLayer, PreNormLayer, build_decoder
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

_NAMES = {
    r"^word_embeddings\.": "embed_tokens.",
    r"^word_embeddings_layernorm\.": "embedding_norm.",
    r"^ln_f\.": "norm.",
    r"^h\.": "layers.",
    r"\.self_attention\.dense\.": ".self_attn.o_proj.",
    r"\.self_attention\.": ".self_attn.",
    r"\.mlp\.dense_h_to_4h\.": ".mlp.fc1.",
    r"\.mlp\.dense_4h_to_h\.": ".mlp.fc2.",
    r"\.ln_attn\.": ".input_layernorm.",
    r"\.ln_mlp\.": ".post_attention_layernorm.",
}

_IGNORED = (
    *("multi_query", "num_kv_heads", "n_embed", "num_ln_in_parallel_attn"),  # among the facts
    *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),  # how BLOOM was trained
    *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "seq_length", "unk_token_id"),
)


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, is_bloom = facts.hf_config, facts.architecture == "BloomForCausalLM"
    reject_unless(config, "apply_residual_connection_post_layernorm", [False])
    ignore(config, *_IGNORED)
    has_alibi = is_bloom or optional(config, "alibi", False)
    is_parallel, has_bias = not is_bloom and optional(config, "parallel_attn", True), optional(config, "bias", is_bloom)
    is_new = optional(config, "new_decoder_architecture", False)
    has_two_norms = not is_parallel or (optional(config, "num_ln_in_parallel_attn", 2 if is_new else 1) == 2)
    width, eps = required(config, "hidden_size", int), optional(config, "layer_norm_epsilon", 1e-5)
    inner_width = optional(config, "ffn_hidden_size", optional(config, "n_inner", 4 * width))
    function = "gelu_new" if is_bloom else activation(config, "gelu", PLAIN, key="activation")
    num_heads, num_kv_heads = placement.sharding.whole_heads(facts)
    scale, slopes = facts.head_dim**-0.5, None
    if has_alibi:  # Falcon scales the biases with the scores; transformers rounds them to bfloat16, we do not
        ignore(config, "rope_parameters")
        factor = 1.0 if is_bloom else scale
        slopes = of_rank([slope * factor for slope in alibi_slopes(num_heads)], placement.sharding)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, scale, slopes=slopes)
    rules = [renamed(_NAMES), split_rows("query_key_value", grouped_qkv(num_heads, num_kv_heads, facts.head_dim))]
    ignored = [r"rotary_emb\.inv_freq$", r"\.self_attn\.masked_bias$"]
    parameters = Parameters(placement, prefixes=["transformer."], ignored=ignored, rules=rules)
    norm = partial(LayerNorm.new, parameters, width=width, eps=eps)

    def layer(index: int, name: str) -> Layer:
        attention_norm = norm(f"{name}.input_layernorm")
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shape,
            width,
            rotary=None if has_alibi else 0,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        )
        mlp = Mlp(parameters, f"{name}.mlp", width, inner_width, activation=function, has_bias=has_bias)
        if not has_two_norms:
            return ParallelLayer(attention_norm, attention, None, mlp)
        mlp_norm = norm(f"{name}.post_attention_layernorm")
        return (ParallelLayer if is_parallel else PreNormLayer)(attention_norm, attention, mlp_norm, mlp)

    return build_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        layer,
        width=width,
        norm=norm,
        is_tied=optional(config, "tie_word_embeddings", True),
        rotaries=[] if has_alibi else [rotary_from_config(config, facts.head_dim)],
        after_embedding=norm("embedding_norm") if is_bloom else None,
    )
