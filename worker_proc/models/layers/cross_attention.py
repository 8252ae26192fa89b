"""Cross-attention: the tokens of a request attend to an encoded item, such as audio."""

from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


class CrossAttention:
    """Query projection, attention to the item of the request, and the output projection.

    Keys and values are computed once per item and kept in a `CrossCache`.

    Args:
        parameters: parameters of the model.
        name: name of the block; its layers are `q_proj`, `k_proj`, `v_proj` and `o_proj`, all with biases.
        index: index among the layers with cross-attention.
        shape: shape of its bidirectional attention.
        width: width of the residual stream.
        item_width: width of the encoder's rows.
    """

    def __init__(
        self, parameters: Parameters, name: str, index: int, shape: AttentionShape, width: int, item_width: int
    ) -> None:
        query_width, self._key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.index, self.shape = index, shape
        parts = {f"{name}.{part}_proj": self._key_width for part in "kv"}
        self._q = Linear.new(parameters, f"{name}.q_proj", width, query_width, bias=True)
        self._kv = Linear.stacked(parameters, f"{name}.kv_proj", parts, item_width, bias=True)
        self._out = Linear.new(parameters, f"{name}.o_proj", query_width, width, bias=True)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        q_TNH = self._q(x_TD).unflatten(1, (-1, self.shape.head_dim))
        return self._out(attention.cross(q_TNH, self.index).flatten(1))

    def keys_and_values(self, item_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return k_TKH and v_TKH of the rows of an item."""
        k, v = self._kv(item_TD).split([self._key_width] * 2, dim=1)
        return k.unflatten(1, (-1, self.shape.head_dim)), v.unflatten(1, (-1, self.shape.head_dim))
