"""The token embedding, whose table may be divided between ranks."""

from torch import Tensor

from octavo.kernels.embedding import embedding, embeddings
from octavo.worker_proc.models.layers.adapters import LayerAdapters
from octavo.worker_proc.models.parameters import Parameters


class TokenEmbedding:
    """Looks up the rows of a table by token ids.

    Args:
        parameters: parameters of the model.
        name: name of the table in the checkpoint.
        vocab_size: rows of the table.
        width: width of a row.
    """

    def __init__(self, parameters: Parameters, name: str, vocab_size: int, width: int) -> None:
        self.table_VD = parameters.new(name, vocab_size, width)
        """Rows for this rank's part of the vocabulary."""
        shard = parameters.shard_of(name)
        self._first_id = shard.ranges[0].start if shard else None
        self._group = parameters.group
        layer, (num_rows, _) = name.removesuffix(".weight"), self.table_VD.shape
        self._adapters = parameters.adapts(
            LayerAdapters(
                num_rows,
                {layer: width},
                {layer: shard},
                is_table=True,
                first_id=self._first_id or 0,
                is_here=parameters.stage.is_first,
            )
        )

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings, shape TD."""
        rows_TD = embedding(token_ids_T, self.table_VD, self._first_id)
        if self._adapters.add is not None:
            rows_TD = self._adapters.add(token_ids_T, rows_TD)
        # Only one rank has a token's row; the others add zeros.
        return rows_TD if self._group is None else self._group.all_reduce(rows_TD, None, rows_TD.dtype)

    def lookup_with(self, token_ids_T: Tensor, *lookups: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return the embeddings, and the rows of other tables; see `octavo.kernels.embedding.embeddings`."""
        if self._group is None and self._adapters.add is None:
            return embeddings((token_ids_T, self.table_VD), *lookups)
        return self(token_ids_T), *(embeddings(*lookups) if lookups else ())
