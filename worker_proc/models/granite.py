"""Granite 3: a Llama with factors of embeddings, scores, outputs of blocks, and logits."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.pointwise import scale
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.hf_config import optional, required
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, PreNormLayer, embedding_and_output
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    is_tied = optional(config, "tie_word_embeddings", False)
    has_bias = optional(config, "attention_bias", False)
    has_mlp_bias = optional(config, "mlp_bias", False)
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-6)
    inner_width, function = required(config, "intermediate_size", int), activation(config, "silu", GATED)
    embedding_factor, residual_factor, score_factor, logits_divisor = (
        optional(config, key, 1.0)
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, score_factor)
    ignored = [r"rotary_emb\.inv_freq$"] + ([r"^lm_head\.weight$"] if is_tied else [])
    parameters = Parameters(placement, prefixes=["model."], ignored=ignored)
    scaled = partial(scale, factor=residual_factor)

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        return PreNormLayer(
            RMSNorm.new(parameters, f"{name}.input_layernorm", width, eps),
            SelfAttention(
                parameters, f"{name}.self_attn", index, shape, width, has_qkv_bias=has_bias, has_output_bias=has_bias
            ),
            RMSNorm.new(parameters, f"{name}.post_attention_layernorm", width, eps),
            GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function, has_bias=has_mlp_bias),
            after_attention=scaled,
            after_mlp=scaled,
        )

    embedding, output = embedding_and_output(parameters, facts, width, is_tied=is_tied)
    return DecoderModel(
        parameters,
        [shape] * facts.num_layers,
        embedding=embedding,
        layers=[layer(index) for index in range(facts.num_layers)],
        norm=RMSNorm.new(parameters, "norm", width, eps),
        output=output,
        rotaries=[rotary_from_config(config, facts.head_dim)],
        after_embedding=partial(scale, factor=embedding_factor),
        after_output=partial(scale, factor=1.0 / logits_divisor),
    )
