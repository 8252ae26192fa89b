"""Encoders: models with bidirectional attention and without logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.embedding import embeddings
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Layer, LayeredModel, Norm, Residual, Tables
from octavo.worker_proc.models.hf_config import ignore
from octavo.worker_proc.models.layers.decoder import AttentionBlock, MlpBlock
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.rotary import Rotary
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.pooling.heads import HeadLayer, PoolingHead

_UNUSED_KEYS = (
    *("tie_word_embeddings", "directionality", "output_past", "_num_labels"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    *("sentence_transformers", "sbert_ce_default_activation_function", "is_matryoshka", "matryoshka_dimensions"),
)
"""Keys of `config.json` that do not affect hidden states."""


def encoder_shape(facts: ModelFacts, window: int | None = None) -> AttentionShape:
    """Return the shape of bidirectional attention, and mark configuration keys of heads as read: other code reads
    them."""
    ignore(facts.hf_config, *_UNUSED_KEYS)
    scale = facts.head_dim**-0.5
    return AttentionShape(facts.num_heads, facts.num_heads, facts.head_dim, scale, window, is_causal=False)


def encoder_head(facts: ModelFacts, classifier: Callable[[int], Sequence[HeadLayer]]) -> PoolingHead:
    """Return the layers that the model applies to pooled vectors.

    Args:
        facts: facts of the model.
        classifier: makes the layers of a classification head, given the number of classes.

    Raises:
        ConfigError: the model is to classify, but has no classification head.
    """
    pooling = facts.pooling
    assert pooling is not None, "an encoder pools"
    if pooling.convert == "embed":
        return PoolingHead(dense=pooling.dense)
    if "Classification" not in facts.architecture:
        raise ConfigError(f"{facts.architecture} has no classification head", hint="use --convert embed")
    return PoolingHead(classifier(pooling.num_labels))


@dataclass(frozen=True, slots=True, eq=False)
class SumNormLayer:
    """A layer that normalizes the sum of each block's output and the residual stream (post-norm): BERT."""

    attention: AttentionBlock
    attention_norm: Norm
    mlp: MlpBlock
    mlp_norm: Norm

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        x_TD = residual.hidden_TD
        x_TD = self.attention_norm(x_TD + self.attention(x_TD, tables, attention))
        return Residual(self.mlp_norm(x_TD + self.mlp(x_TD)))


class SameNorm:
    """An identity in place of a norm."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rows."""
        return x

    def fused_add_norm(self, x_TD: Tensor, update_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x + update`, twice."""
        total_TD = x_TD + update_TD
        return total_TD, total_TD


class PlaceEmbedding:
    """The sum of position and segment (BERT's token type) embeddings, as one table that is added to token embeddings.

    Rows of the table are the sums for all positions of the first segment, then for those of the second. A model without
    a position table has one row for all positions.

    Args:
        parameters: parameters of the model; the tables are `embed_positions.weight` and `embed_segments.weight`.
        width: width of a row.
        num_positions: rows of the position table; 0 if there is none.
        first_position: row of the table for the first token of a request.
        num_segments: rows of the segment table; 0 if there is none.
        used_segments: number of segments that these requests may use.
    """

    def __init__(
        self,
        parameters: Parameters,
        width: int,
        *,
        num_positions: int = 0,
        first_position: int = 0,
        num_segments: int = 0,
        used_segments: int = 1,
    ) -> None:
        self.segment_stride = num_positions - first_position if used_segments > 1 and num_positions else 0
        """Rows per segment; 0 if there is only one segment."""
        self._is_here = parameters.stage.is_first
        self._first_position, self._used_segments = first_position, used_segments
        self._segments_SD = parameters.new("embed_segments.weight", num_segments, width) if num_segments else None
        self._positions_LD = parameters.new("embed_positions.weight", num_positions, width) if num_positions else None
        self._table_PD: Tensor | None = None
        parameters.derived.append(self._refresh)

    def prepare(self, max_model_len: int) -> None:
        """Compute the table from the weights."""
        if not self._is_here:
            return
        if self._positions_LD is None:
            assert self._segments_SD is not None, "a place has a position or a segment"
            self._table_PD = self._segments_SD[:1].expand(max_model_len, -1)  # one row of memory for all
        elif self._table_PD is None:
            self._table_PD = self._sums()

    def lookup(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices and table, for `octavo.kernels.embedding.embeddings`."""
        assert self._table_PD is not None, "prepare() comes first"
        return positions_T, self._table_PD

    def _refresh(self) -> None:
        if self._positions_LD is not None and self._table_PD is not None:
            self._table_PD.copy_(self._sums())

    def _sums(self) -> Tensor:
        assert self._positions_LD is not None, "a table of positions"
        positions_LD = self._positions_LD[self._first_position :]
        if self._segments_SD is None:
            return positions_LD.clone()
        return torch.cat([segment_D + positions_LD for segment_D in self._segments_SD[: self._used_segments]])


class EncoderModel(LayeredModel):
    """Embeddings with their norm, and layers. The hidden states of the last layer are the result.

    Args:
        parameters: parameters of all parts.
        shapes: shapes of the attention of each layer.
        embedding: token embedding.
        place: added to the token embedding; `None` if there is none.
        norm: norm of the sum.
        layers: layers in order.
        rotaries: rotary embeddings whose angles the layers use.
        final_norm: norm after the last layer; `None` if the last layer includes it.
    """

    def __init__(
        self,
        parameters: Parameters,
        shapes: Sequence[AttentionShape],
        *,
        embedding: TokenEmbedding,
        place: PlaceEmbedding | None,
        norm: Norm,
        layers: Sequence[Layer],
        rotaries: Sequence[Rotary] = (),
        final_norm: Norm | None = None,
    ) -> None:
        super().__init__(parameters, shapes)
        self.layers = layers
        self.segment_stride = place.segment_stride if place else 0
        self._embedding = embedding
        self._place = place
        self._norm = norm
        self._rotaries = rotaries
        self._final_norm = final_norm

    def prepare(self, max_model_len: int) -> None:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        if self._place is not None:
            self._place.prepare(max_model_len)
        for rotary in self._rotaries:
            rotary.prepare(max_model_len, self.device)

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        places = [self._place.lookup(positions_T)] if self._place else []
        hidden_TD, *others = self._embedding.lookup_with(token_ids_T, *places, *self._lookups(positions_T))
        hidden_TD = self.with_given_rows(hidden_TD, token_ids_T)
        if places:
            hidden_TD = hidden_TD + others.pop(0)
        return Residual(self._norm(hidden_TD)), tuple(others)

    def tables(self, positions_T: Tensor) -> Tables:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return embeddings(*self._lookups(positions_T)) if self._rotaries else ()

    def end(self, residual: Residual) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return residual.hidden_TD if self._final_norm is None else residual.normalized(self._final_norm)[1]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the rows: an encoder has no logits."""
        return hidden_RD

    def _lookups(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [lookup for rotary in self._rotaries for lookup in rotary.lookups(positions_T)]
