"""Self-attention with its projections. What attends over the cache is `octavo.worker_proc.attention`."""

import torch
from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.pointwise import clamp
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.rope_store_kv.rotation import QKNorm, Rotation
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.layers.devices import require_cpu
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


class SelfAttention:
    """Queries, keys and values of each row, attention over the request so far, and the output projection.

    Args:
        parameters: of the model.
        name: of the block; its layers are `q_proj`, `k_proj`, `v_proj` and `o_proj`.
        index: of the layer.
        shape: of its attention.
        width: of the residual stream.
        rotary: which of the model's rotary embeddings rotates queries and keys; None: they are not rotated.
        has_qkv_bias: of the three projections.
        has_output_bias: of the output projection.
        qk_norm: of queries and keys, before they are rotated: each head alone, or all heads of a row together.
        clip: queries, keys and values are limited to [-clip, clip]; None: they are not.
        has_sinks: each head has a score, `sinks`, that takes part in the softmax without a value.

    Raises:
        ConfigError: the model is on a GPU, which has no kernels for this attention.
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
        clip: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        if has_sinks:
            require_cpu(parameters, "attention sinks")
        if shape.is_chunked:
            require_cpu(parameters, "attention in chunks")
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._widths = [query_width, key_width, key_width]
        parts = {f"{name}.{part}_proj": width for part, width in zip("qkv", self._widths, strict=True)}
        self._index = index
        self._head_dim = shape.head_dim
        self._rotary = rotary
        is_per_head = qk_norm is not None and qk_norm.q_weight_H.shape == (shape.head_dim,)
        # The norm of each head is one pass with the rotation.
        self._rotated_norm = qk_norm if is_per_head and rotary is not None else None
        self._norm = qk_norm if self._rotated_norm is None else None
        self._clip = clip
        self._sinks_N = parameters.new(f"{name}.sinks", shape.num_heads, dtype=torch.float32) if has_sinks else None
        self._qkv = Linear.stacked(parameters, f"{name}.qkv_proj", parts, width, bias=has_qkv_bias)
        self._out = Linear.new(parameters, f"{name}.o_proj", query_width, width, bias=has_output_bias)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        qkv = self._qkv(x_TD)
        q, k, v = (qkv if self._clip is None else clamp(qkv, self._clip)).split(self._widths, dim=1)
        if self._norm is not None:
            q = self._normalized(q, self._norm.q_weight_H, self._norm.eps)
            k = self._normalized(k, self._norm.k_weight_H, self._norm.eps)
        q_TNH, k_TKH, v_TKH = (part.unflatten(1, (-1, self._head_dim)) for part in (q, k, v))
        rotation = None
        if self._rotary is not None:
            cos_TC, sin_TC = tables[2 * self._rotary : 2 * self._rotary + 2]
            rotation = Rotation(cos_TC, sin_TC, self._rotated_norm)
        out_TNH = attention.run(q_TNH, k_TKH, v_TKH, self._index, rotation, sinks_N=self._sinks_N)
        return self._out(out_TNH.flatten(1))

    def _normalized(self, x_TP: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the norm of rows, or of each head if the weight is as long as one."""
        if len(weight) == self._head_dim:
            return rms_norm(x_TP.unflatten(1, (-1, self._head_dim)), weight, eps).flatten(1)
        return rms_norm(x_TP, weight, eps)


def head_norm(
    parameters: Parameters, name: str, head_dim: int, eps: float, *, dtype: torch.dtype | None = None
) -> QKNorm:
    """Make the norm of each head of queries and keys, `q_norm` and `k_norm` of the block `name`."""
    q_weight_H, k_weight_H = (parameters.new(f"{name}.{part}_norm.weight", head_dim, dtype=dtype) for part in "qk")
    return QKNorm(q_weight_H, k_weight_H, eps)


def row_norm(parameters: Parameters, name: str, shape: AttentionShape, eps: float) -> QKNorm:
    """Make the norm of all heads of a row together.

    Raises:
        ConfigError: ranks divide the heads.
    """
    if parameters.group is not None:
        raise ConfigError(
            "--tensor-parallel-size: the model normalizes all heads of its queries together, which ranks do not have",
            hint="use --pipeline-parallel-size instead",
        )
    q_weight = parameters.new(f"{name}.q_norm.weight", shape.num_heads * shape.head_dim)
    k_weight = parameters.new(f"{name}.k_norm.weight", shape.num_kv_heads * shape.head_dim)
    return QKNorm(q_weight, k_weight, eps)
