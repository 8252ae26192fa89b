"""Self-attention with its projections. What attends over the cache is `octavo.worker_proc.attention`."""

from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.rope_store_kv.rotation import QKNorm, Rotation
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


class SelfAttention:
    """Queries, keys and values of each row, attention over the request so far, and the output projection.

    Args:
        parameters: of the model.
        name: of the block in the checkpoint; its layers are `q_proj`, `k_proj`, `v_proj` and `o_proj`.
        index: of the layer.
        shape: of its attention.
        width: of the residual stream.
        rotary: which of the model's rotary embeddings rotates queries and keys; None: they are not rotated.
        has_qkv_bias: of the three projections.
        has_output_bias: of the output projection.
        qk_norm: of each head of queries and keys, before they are rotated.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        index: int,
        shape: AttentionShape,
        width: int,
        *,
        rotary: int | None = 0,
        has_qkv_bias: bool = False,
        has_output_bias: bool = False,
        qk_norm: QKNorm | None = None,
    ) -> None:
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._widths = [query_width, key_width, key_width]
        parts = {f"{name}.{part}_proj": width for part, width in zip("qkv", self._widths, strict=True)}
        self._index = index
        self._head_dim = shape.head_dim
        self._rotary = rotary
        self._qk_norm = qk_norm
        self._qkv = Linear.stacked(parameters, f"{name}.qkv_proj", parts, width, bias=has_qkv_bias)
        self._out = Linear.new(parameters, f"{name}.o_proj", query_width, width, bias=has_output_bias)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        parts = self._qkv(x_TD).split(self._widths, dim=1)
        q_TNH, k_TKH, v_TKH = (part.unflatten(1, (-1, self._head_dim)) for part in parts)
        rotation = None
        if self._rotary is not None:
            cos_TC, sin_TC = tables[2 * self._rotary : 2 * self._rotary + 2]
            rotation = Rotation(cos_TC, sin_TC, self._qk_norm)
        return self._out(attention.run(q_TNH, k_TKH, v_TKH, self._index, rotation).flatten(1))


def head_norm(parameters: Parameters, name: str, head_dim: int, eps: float) -> QKNorm:
    """Make the norm of each head of queries and keys, `q_norm` and `k_norm` of the block `name`."""
    q_weight_H, k_weight_H = (parameters.new(f"{name}.{part}_norm.weight", head_dim) for part in "qk")
    return QKNorm(q_weight_H, k_weight_H, eps)
