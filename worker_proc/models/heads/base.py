"""`DraftHead`: a draft head as a model with its own cache, separate from that of its target model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.given_rows import all_given_rows
from octavo.kernels.native.memory import allocate
from octavo.kernels.paged_attention import AttentionShape
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Layer, Model, Norm, Residual, Tables
from octavo.worker_proc.models.features import Features
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.models.layers.rotary import Rotary
from octavo.worker_proc.models.parameters import Parameters

FirstLayer = Callable[[Tensor, Tensor, Tables, Attention], Residual]
"""Maps token embeddings and the features of the positions before them to the residual stream."""


class DraftHead(Model):
    """Draws the token after next from a hidden state and the next token.

    The row of position p has the embedding of token p + 1 and the features of the model at p; its logits are those of
    token p + 2. When the model has not computed a position yet, the head's own `features` take their place.

    Args:
        parameters: parameters of the head.
        shapes: shapes of the attention of each layer.
        model: target model, whose embeddings the head shares.
        first: the first layer.
        layers: the others.
        rotary: rotary embedding of the attention.
        norm: norm of the residual stream, before `output`; `None` if there is none.
        output: projects hidden states to logits.
        token_ids_V: the token of each logit; `None` if all tokens have one.
        max_rows: most rows of a step.
    """

    is_recordable = True

    def __init__(
        self,
        parameters: Parameters,
        shapes: Sequence[AttentionShape],
        *,
        model: DecoderModel,
        first: FirstLayer,
        layers: Sequence[Layer],
        rotary: Rotary,
        norm: Norm | None,
        output: Callable[[Tensor], Tensor],
        token_ids_V: Tensor | None,
        max_rows: int,
    ) -> None:
        super().__init__(parameters, shapes)
        self.library = model.library
        self.token_ids_V = token_ids_V
        self.features = self._own_features = Features()
        self._embedding = model.embedding
        self._first, self._layers = first, layers
        self._rotary, self._norm, self._output = rotary, norm, output
        # Native programs pass rows on in float32.
        dtype, width = torch.float32 if self.library else self.dtype, model.embedding.table_VD.shape[1]
        num_bytes = max_rows * width * dtype.itemsize
        on_host = self.device.type == "cpu"  # where rows take memory only once they are used
        memory_B = allocate(num_bytes) if on_host else torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self.inputs_XD = memory_B[:num_bytes].view(dtype).view(max_rows, width)
        """The features that the next step reads, row by row."""

    def finish_loading(self) -> None:
        """Convert the differences from the ids of logits, which checkpoints store, to `token_ids_V`."""
        if self.token_ids_V is not None:
            self.token_ids_V += torch.arange(len(self.token_ids_V), device=self.device)

    def prepare(self, max_model_len: int) -> None:
        """See `octavo.worker_proc.models.base.Model`."""
        self._rotary.prepare(max_model_len, self.device)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.base.Model`; `token_ids_T` are those after the positions."""
        embedded_TD, *tables = self._embedding.lookup_with(token_ids_T, *self._rotary.lookups(positions_T))
        features_TD = all_given_rows(token_ids_T, self.inputs_XD)
        residual = self._first(embedded_TD, features_TD, tuple(tables), attention)
        for layer in self._layers:
            residual = layer(residual, tuple(tables), attention)
        total_TD = residual.total()
        self._own_features.finish(total_TD)
        return total_TD if self._norm is None else self._norm(total_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.base.Model`; of `token_ids_V`."""
        return self._output(hidden_RD)
