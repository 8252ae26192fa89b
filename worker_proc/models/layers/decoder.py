"""Decoder layers, and the decoder model of most architectures.

A layer adds two blocks, attention and mlp, to the residual stream and does not know their kind (dense, a mixture of
experts, a state-space block): a block is an object with the signature of `AttentionBlock` or `MlpBlock`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, Unpack

from torch import Tensor

from octavo.kernels.embedding import embeddings
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.cache.groups import StateShape
from octavo.worker_proc.models.base import Layer, LayeredModel, Norm, Residual, Tables
from octavo.worker_proc.models.hf_config import optional
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.query_scale import QueryScale
from octavo.worker_proc.models.layers.rotary import AxisRotary, Rotary
from octavo.worker_proc.models.parameters import Parameters


class AttentionBlock(Protocol):
    """A block that mixes the rows of each request."""

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """Return what is added to the residual stream, shape TD."""


class MlpBlock(Protocol):
    """A block that computes each row independently."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return what is added to the residual stream, shape TD."""


@dataclass(frozen=True, slots=True, eq=False)
class PreNormLayer:
    """Each block reads the norm of the residual stream: Llama and most others."""

    attention_norm: Norm
    attention: AttentionBlock
    mlp_norm: Norm
    mlp: MlpBlock
    after_attention: Callable[[Tensor], Tensor] | None = field(default=None, kw_only=True)
    """Applied to the output of the attention block: a second norm, or a factor."""
    after_mlp: Callable[[Tensor], Tensor] | None = field(default=None, kw_only=True)

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        residual, x_TD = residual.normalized(self.attention_norm)
        update_TD = self.attention(x_TD, tables, attention)
        residual = residual.plus(self.after_attention(update_TD) if self.after_attention else update_TD)
        residual, x_TD = residual.normalized(self.mlp_norm)
        update_TD = self.mlp(x_TD)
        return residual.plus(self.after_mlp(update_TD) if self.after_mlp else update_TD)


@dataclass(frozen=True, slots=True, eq=False)
class SingleBlockLayer:
    """A single block that mixes rows and reads the norm of the residual stream: Mamba-2, Nemotron-H."""

    norm: Norm
    block: AttentionBlock

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        residual, x_TD = residual.normalized(self.norm)
        return residual.plus(self.block(x_TD, tables, attention))


@dataclass(frozen=True, slots=True, eq=False)
class MlpLayer:
    """A single mlp that reads the norm of the residual stream: Nemotron-H."""

    norm: Norm
    mlp: MlpBlock

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        residual, x_TD = residual.normalized(self.norm)
        return residual.plus(self.mlp(x_TD))


@dataclass(frozen=True, slots=True, eq=False)
class PostNormLayer:
    """Each block reads the residual stream itself, and its output is normalized: OLMo 2, EXAONE 4."""

    attention: AttentionBlock
    attention_norm: Norm
    mlp: MlpBlock
    mlp_norm: Norm

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        residual = Residual(residual.total())
        update_TD = self.attention_norm(self.attention(residual.hidden_TD, tables, attention))
        residual = Residual(residual.plus(update_TD).total())
        return residual.plus(self.mlp_norm(self.mlp(residual.hidden_TD)))


@dataclass(frozen=True, slots=True, eq=False)
class ParallelLayer:
    """Both blocks read the stream before the layer, through one norm or through one each: Cohere, GPT-NeoX."""

    attention_norm: Norm
    attention: AttentionBlock
    mlp_norm: Norm | None
    """Norm before the mlp; `None` if the mlp reads the attention's norm."""
    mlp: MlpBlock

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        residual, x_TD = residual.normalized(self.attention_norm)
        residual_TD = residual.hidden_TD
        residual = residual.plus(self.attention(x_TD, tables, attention))
        return residual.plus(self.mlp(x_TD if self.mlp_norm is None else self.mlp_norm(residual_TD)))


class DecoderModel(LayeredModel):
    """Embedding, layers, norm and output.

    Args:
        parameters: parameters of all parts.
        shapes: shape of the attention of each layer; `None` for a layer without attention.
        embedding: token embedding.
        layers: layers in order.
        norm: norm after the last layer.
        output: projects hidden states to logits; `None` if the model pools.
        rotaries: rotary embeddings whose angles the layers use.
        states: state shapes of layers with a recurrence; see `Model`.
        after_embedding: applied to the embeddings, such as a factor.
        after_output: applied to the logits.
        is_embedding_scaled: whether `after_embedding` belongs to the embedding module in `transformers`. It is then
            not applied to prompt embeddings.
        query_scale: factors by which some layers multiply their queries; they come after the tables of `rotaries`.
    """

    carries_update = True

    def __init__(
        self,
        parameters: Parameters,
        shapes: Sequence[AttentionShape | None],
        *,
        embedding: TokenEmbedding,
        layers: Sequence[Layer],
        norm: Norm,
        output: Callable[[Tensor], Tensor] | None,
        rotaries: Sequence[Rotary] = (),
        states: Sequence[StateShape | None] = (),
        after_embedding: Callable[[Tensor], Tensor] | None = None,
        after_output: Callable[[Tensor], Tensor] | None = None,
        is_embedding_scaled: bool = False,
        query_scale: QueryScale | None = None,
    ) -> None:
        super().__init__(parameters, shapes, states)
        self.layers = layers
        self._embedding = embedding
        self._norm = norm
        self._output = output
        self._rotaries = rotaries
        self._query_scale = query_scale
        self._after_embedding = after_embedding
        self._after_output = after_output
        self._is_embedding_scaled = is_embedding_scaled

    @property
    def embedding(self) -> TokenEmbedding:
        """Token embedding, before `after_embedding`."""
        return self._embedding

    @property
    def rotaries(self) -> Sequence[Rotary]:
        """Rotary embeddings whose angles the layers use."""
        return self._rotaries

    def take_given_rows(self, max_rows: int, num_deeper: int = 0) -> None:
        """See `octavo.worker_proc.models.base.LayeredModel`. Image rows may come with grid positions."""
        super().take_given_rows(max_rows, num_deeper)
        for rotary in self._rotaries:
            if isinstance(rotary, AxisRotary):
                self.step_angles = rotary
                rotary.take_steps(max_rows, self.device)

    def prepare(self, max_model_len: int) -> None:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        for rotary in self._rotaries:
            rotary.prepare(max_model_len, self.device)
        if self._query_scale is not None:
            self._query_scale.prepare(max_model_len, self.device)

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        hidden_TD, *tables = self._embedding.lookup_with(token_ids_T, *self._lookups(positions_T))
        if self._after_embedding is None:
            hidden_TD = self.with_given_rows(hidden_TD, token_ids_T)
        elif self._is_embedding_scaled:
            hidden_TD = self.with_given_rows(self._after_embedding(hidden_TD), token_ids_T)
        else:
            hidden_TD = self._after_embedding(self.with_given_rows(hidden_TD, token_ids_T))
        return Residual(hidden_TD), tuple(tables)

    def tables(self, positions_T: Tensor) -> Tables:
        """See `octavo.worker_proc.models.base.LayeredModel`. Cosines and sines of each rotary embedding, in order."""
        return embeddings(*self._lookups(positions_T)) if self._rotaries else ()

    def end(self, residual: Residual) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return residual.normalized(self._norm)[1]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        if self._output is None:
            return hidden_RD
        logits_RV = self._output(hidden_RD)
        return self._after_output(logits_RV) if self._after_output else logits_RV

    def _lookups(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        lookups = [lookup for rotary in self._rotaries for lookup in rotary.lookups(positions_T)]
        return lookups if self._query_scale is None else [*lookups, self._query_scale.lookup(positions_T)]


class DecoderOptions(TypedDict, total=False):
    """Arguments of `DecoderModel` with defaults, which functions that build a decoder pass on."""

    rotaries: Sequence[Rotary]
    states: Sequence[StateShape | None]
    after_embedding: Callable[[Tensor], Tensor] | None
    after_output: Callable[[Tensor], Tensor] | None
    is_embedding_scaled: bool
    query_scale: QueryScale | None


def build_decoder(
    facts: ModelFacts,
    parameters: Parameters,
    shapes: Sequence[AttentionShape | None],
    layer: Callable[[int, str], Layer],
    *,
    width: int,
    norm: Callable[[str], Norm],
    is_tied: bool | None = None,
    has_output_bias: bool = False,
    **options: Unpack[DecoderOptions],
) -> DecoderModel:
    """Make a decoder: `embed_tokens`, the layers, `norm`, and `lm_head` unless the model pools.

    Args:
        facts: facts of the model, or of a rank's part of it.
        parameters: parameters of all parts.
        shapes: shape of the attention of each layer; `None` for a layer without attention.
        layer: makes a layer, given its index and name.
        width: width of the hidden states.
        norm: makes a norm, given its name.
        is_tied: whether embedding and output share a weight; `None` means as the configuration says, by default not.
        has_output_bias: whether the output has a bias.
        options: see `DecoderModel`.
    """
    embedding, output = TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, width), None
    if is_tied is None:
        is_tied = optional(facts.hf_config, "tie_word_embeddings", False)
    if facts.pooling is not None:
        parameters.names.ignore(r"^lm_head\.")
    elif is_tied:
        parameters.names.ignore(r"^lm_head\.weight$")
        output = Linear.tied(parameters, embedding.table_VD)
    else:
        output = Linear.new(parameters, "lm_head", width, facts.vocab_size, bias=has_output_bias)
    layers = [layer(index, f"layers.{index}") for index in range(facts.num_layers)]
    return DecoderModel(
        parameters, shapes, embedding=embedding, layers=layers, norm=norm("norm"), output=output, **options
    )
