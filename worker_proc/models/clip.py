"""The text models of CLIP and SigLIP. Their images are encoded by `octavo.worker_proc.models.vision.dual_encoder`."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import PreNormLayer
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.encoder import EncoderModel, PlaceEmbedding, SameNorm
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.pooling.heads import Dense, PoolingHead

_NAMES = {
    r"^embeddings\.token_embedding\.": "embed_tokens.",
    r"^embeddings\.position_embedding\.": "embed_positions.",
    r"^encoder\.layers\.": "layers.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"^final_layer_norm\.": "final_norm.",
    r"^head\.": "text_projection.",
}
_UNUSED = (r"^embeddings\.position_ids$", r"^logit_(scale|bias)$")


def build(facts: ModelFacts, placement: Placement) -> EncoderModel:
    """Make the text model, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    assert facts.pooling is not None, "CLIP pools"
    config = facts.hf_config
    reject_unless(config, "add_cross_attention", [False, None])
    ignore(config, "tie_word_embeddings")  # there is no output layer
    width, inner_width = required(config, "hidden_size", int), required(config, "intermediate_size", int)
    function, eps = activation(config, "", PLAIN), required(config, "layer_norm_eps", float)
    shape = AttentionShape(
        facts.num_heads, facts.num_heads, facts.head_dim, facts.head_dim**-0.5, is_causal=facts.pooling.is_causal
    )
    parameters = Parameters(placement, prefixes=[], ignored=_UNUSED, rules=[renamed(_NAMES)])
    norm = partial(LayerNorm.new, parameters, width=width, eps=eps)

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        attention = SelfAttention(
            parameters, f"{name}.self_attn", index, shape, width, rotary=None, has_qkv_bias=True, has_output_bias=True
        )
        mlp = Mlp(parameters, f"{name}.mlp", width, inner_width, activation=function, has_bias=True)
        return PreNormLayer(norm(f"{name}.layer_norm1"), attention, norm(f"{name}.layer_norm2"), mlp)

    model = EncoderModel(
        parameters,
        [shape] * facts.num_layers,
        embedding=TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, width),
        place=PlaceEmbedding(parameters, width, num_positions=facts.max_position_embeddings),
        norm=SameNorm(),
        layers=[layer(index) for index in range(facts.num_layers)],
        final_norm=norm("final_norm"),
    )
    has_bias = optional(config, "has_projection_bias", False)
    projection = required(config, "projection_dim", int)
    model.pooling_head = PoolingHead([Dense.new(parameters, "text_projection", width, projection, has_bias=has_bias)])
    return model
