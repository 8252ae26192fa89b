"""Whisper's decoder: self-attention over the text so far, and cross-attention to the encoded audio."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from octavo.kernels.embedding import embedding
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.audio.whisper import whisper_rules
from octavo.worker_proc.models.base import LayeredModel, Norm, Residual, Tables
from octavo.worker_proc.models.hf_config import reject_unless, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.cross_attention import CrossAttention
from octavo.worker_proc.models.layers.decoder import MlpBlock
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

EPS = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class WhisperLayer:
    """Three blocks, each of which reads the norm of the residual stream."""

    attention_norm: Norm
    attention: SelfAttention
    cross_norm: Norm
    cross: CrossAttention
    mlp_norm: Norm
    mlp: MlpBlock

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        residual, x_TD = residual.normalized(self.attention_norm)
        residual, x_TD = residual.plus(self.attention(x_TD, tables, attention)).normalized(self.cross_norm)
        residual, x_TD = residual.plus(self.cross(x_TD, tables, attention)).normalized(self.mlp_norm)
        return residual.plus(self.mlp(x_TD))


class WhisperDecoder(LayeredModel):
    """Token and position embeddings, layers and norm; the output weight is the token embedding."""

    carries_update = True

    def __init__(self, parameters: Parameters, facts: ModelFacts) -> None:
        config = facts.hf_config
        width, head_dim = required(config, "hidden_size", int), facts.head_dim
        shape = AttentionShape(facts.num_heads, facts.num_heads, head_dim, head_dim**-0.5)
        cross_shape = AttentionShape(facts.num_heads, facts.num_heads, head_dim, head_dim**-0.5, is_causal=False)
        super().__init__(parameters, [shape] * facts.num_layers)
        self._embedding = TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, width)
        self._positions_LD = parameters.new("embed_positions.weight", facts.max_position_embeddings, width)
        inner_width, function = (
            required(config, "decoder_ffn_dim", int),
            activation(config, "gelu", PLAIN, key="activation_function"),
        )
        norm = partial(LayerNorm.new, parameters, width=width, eps=EPS)

        def layer(index: int) -> WhisperLayer:
            name = f"layers.{index}"
            return WhisperLayer(
                norm(f"{name}.self_attn_layer_norm"),
                SelfAttention(
                    parameters,
                    f"{name}.self_attn",
                    index,
                    shape,
                    width,
                    rotary=None,
                    has_qkv_bias=True,
                    has_output_bias=True,
                ),
                norm(f"{name}.encoder_attn_layer_norm"),
                CrossAttention(parameters, f"{name}.encoder_attn", index, cross_shape, width, width),
                norm(f"{name}.final_layer_norm"),
                Mlp(parameters, name, width, inner_width, activation=function, has_bias=True),
            )

        layers = [layer(index) for index in range(facts.num_layers)]
        self.layers = layers
        self.cross_layers = [layer.cross for layer in layers]
        self._norm = norm("layer_norm")
        self._output = Linear.tied(parameters, self._embedding.table_VD)

    def prepare(self, max_model_len: int) -> None:
        """Do nothing: positions are weights."""

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return Residual(self._embedding(token_ids_T) + embedding(positions_T, self._positions_LD)), ()

    def end(self, residual: Residual) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return residual.normalized(self._norm)[1]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return self._output(hidden_RD)


def build(facts: ModelFacts, placement: Placement) -> WhisperDecoder:
    """Make the decoder that `facts` describes.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    reject_unless(facts.hf_config, "scale_embedding", [False])
    reject_unless(facts.hf_config, "tie_word_embeddings", [True])
    parameters = Parameters(
        placement, prefixes=["model.decoder.", "decoder."], ignored=[r"^proj_out\.weight$"], rules=whisper_rules()
    )
    return WhisperDecoder(parameters, facts)
