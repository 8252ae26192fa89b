"""MPT: ALiBi, layer norms without biases, a fused projection."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import renamed, split_rows, stacked_qkv
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless, required
from octavo.worker_proc.models.layers.alibi import mpt_slopes, of_rank
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, PreNormLayer, build_decoder
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

_NAMES = {
    r"^wte\.": "embed_tokens.",
    r"^norm_f\.": "norm.",
    r"^blocks\.": "layers.",
    r"\.attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.attn\.": ".self_attn.",
    r"\.ffn\.up_proj\.": ".mlp.fc1.",
    r"\.ffn\.down_proj\.": ".mlp.fc2.",
}
_ONLY = {"expansion_ratio": 4, "no_bias": True, "learned_pos_emb": True, "logit_scale": None, "embedding_fraction": 1.0}
"""`learned_pos_emb` is always true and never used with ALiBi."""
_ONLY_ATTENTION = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "alibi": True}


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, attention_config = facts.hf_config, _attention_config(facts)
    for key, only in _ONLY.items():
        reject_unless(config, key, [only])
    for key, supported in _ONLY_ATTENTION.items():
        reject_unless(attention_config, key, [supported])
    reject_unless(config, "norm_type", ["low_precision_layernorm", "layernorm"])
    ignore(config, "init_device", "emb_pdrop", "verbose", "init_config")
    width, eps = required(config, "d_model", int), optional(config, "layer_norm_epsilon", 1e-5)
    inner_width = optional(config, "n_inner", 4 * width)
    num_heads, num_kv_heads = placement.sharding.whole_heads(facts)
    scale = optional(attention_config, "softmax_scale", facts.head_dim**-0.5)
    slopes = mpt_slopes(num_heads, optional(attention_config, "alibi_bias_max", 8))
    heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
    shape = AttentionShape(*heads, scale, slopes=of_rank(slopes, placement.sharding))
    clip = None if attention_config.get("clip_qkv") is None else required(attention_config, "clip_qkv", float)
    ignore(attention_config, "attn_impl", "attn_pdrop", "attn_uses_sequence_id")  # training, implementation
    attention_config.reject_unread(facts.architecture)
    rules = [renamed(_NAMES), split_rows("Wqkv", stacked_qkv(num_heads, num_kv_heads, facts.head_dim))]
    parameters = Parameters(placement, prefixes=["transformer."], rules=rules)
    norm = partial(LayerNorm.new, parameters, width=width, eps=eps, has_bias=False)

    def layer(index: int, name: str) -> PreNormLayer:
        return PreNormLayer(
            norm(f"{name}.norm_1"),
            SelfAttention(parameters, f"{name}.self_attn", index, shape, width, rotary=None, clip=clip),
            norm(f"{name}.norm_2"),
            Mlp(parameters, f"{name}.mlp", width, inner_width, activation="gelu", has_bias=False),
        )

    shapes, is_tied = [shape] * facts.num_layers, optional(config, "tie_word_embeddings", True)
    return build_decoder(facts, parameters, shapes, layer, width=width, norm=norm, is_tied=is_tied)


def _attention_config(facts: ModelFacts) -> CheckedConfig:
    """Return `attn_config`, which describes the attention."""
    return CheckedConfig(optional(facts.hf_config, "attn_config", {"alibi": False}), "attn_config")
