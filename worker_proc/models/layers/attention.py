"""Self-attention with its projections. `octavo.worker_proc.attention` attends over the cache."""

import torch
from torch import Tensor

from octavo.kernels.multiply import multiply
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.pointwise import clamp
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.rope_store_kv.rotation import QKNorm, Rotation
from octavo.kernels.sigmoid_and_mul import sigmoid_and_mul
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.row_norms import RowNorms
from octavo.worker_proc.models.parameters import Parameters


class SelfAttention:
    """Projections to queries, keys and values, attention over the request so far, and the output projection.

    Args:
        parameters: parameters of the model.
        name: name of the block; its layers are `q_proj`, `k_proj`, `v_proj` and `o_proj`.
        index: index of the layer.
        shape: shape of its attention.
        width: width of the residual stream.
        rotary: index of the rotary embedding that rotates queries and keys; `None` if they are not rotated.
        has_qkv_bias: whether the three projections have biases.
        has_output_bias: whether the output projection has a bias.
        qk_norm: norm of each single head of queries and keys, before rotation.
        row_norms: norms of queries and keys over all heads together, or with weights per head; see `row_norms.py`.
        clip: limits queries, keys and values to [-clip, clip]; `None` if there is no limit.
        has_sinks: whether each head has a score, `sinks`, that takes part in the softmax without a value.
        has_gate: whether the sigmoid of a further projection, `gate_proj`, scales the inputs of the output projection.
        has_query_scale: whether the last table of a step has a factor for the queries of each row.
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
        row_norms: RowNorms | None = None,
        clip: float | None = None,
        has_sinks: bool = False,
        has_gate: bool = False,
        has_query_scale: bool = False,
    ) -> None:
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._widths = [query_width, key_width, key_width]
        parts = {f"{name}.{part}_proj": width for part, width in zip("qkv", self._widths, strict=True)}
        if has_gate:
            parts[f"{name}.gate_proj"] = query_width
        self._has_gate = has_gate
        self._has_query_scale = has_query_scale
        self._index = index
        self._head_dim = shape.head_dim
        self._rotary = rotary
        self._norm = qk_norm
        self._row_norms = row_norms
        self._clip = clip
        self._sinks_N = parameters.new(f"{name}.sinks", shape.num_heads, dtype=torch.float32) if has_sinks else None
        self._qkv = Linear.stacked(parameters, f"{name}.qkv_proj", parts, width, bias=has_qkv_bias)
        self._out = Linear.new(parameters, f"{name}.o_proj", query_width, width, bias=has_output_bias)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        qkv = self._qkv(x_TD)
        gate_TP = None
        if self._has_gate:
            qkv, gate_TP = qkv.split([sum(self._widths), self._widths[0]], dim=1)
        q, k, v = (qkv if self._clip is None else clamp(qkv, self._clip)).split(self._widths, dim=1)
        if self._row_norms is not None:
            q, k = self._row_norms.q(q), self._row_norms.k(k)
        if self._has_query_scale:
            q = multiply(q, tables[-1])
        q_TNH, k_TKH, v_TKH = (part.unflatten(1, (-1, self._head_dim)) for part in (q, k, v))
        rotation = None
        if self._rotary is not None:
            cos_TC, sin_TC = tables[2 * self._rotary : 2 * self._rotary + 2]
            rotation = Rotation(cos_TC, sin_TC, self._norm)  # both in one pass
        elif self._norm is not None:
            q_TNH = rms_norm(q_TNH, self._norm.q_weight_H, self._norm.eps)
            k_TKH = rms_norm(k_TKH, self._norm.k_weight_H, self._norm.eps)
        out_TNH = attention.run(q_TNH, k_TKH, v_TKH, self._index, rotation, sinks_N=self._sinks_N)
        out_TP = out_TNH.flatten(1)
        return self._out(out_TP if gate_TP is None else sigmoid_and_mul(gate_TP, out_TP))


def head_norm(
    parameters: Parameters, name: str, head_dim: int, eps: float, *, dtype: torch.dtype | None = None
) -> QKNorm:
    """Make the norms of each head of queries and keys: `q_norm` and `k_norm` of the block `name`."""
    q_weight_H, k_weight_H = (parameters.new(f"{name}.{part}_norm.weight", head_dim, dtype=dtype) for part in "qk")
    return QKNorm(q_weight_H, k_weight_H, eps)


def unweighted_norm(parameters: Parameters, head_dim: int, eps: float) -> QKNorm:
    """Make norms without weights of each head of queries and keys."""
    ones_H = torch.ones(head_dim, dtype=parameters.dtype, device=parameters.device)
    return QKNorm(ones_H, ones_H, eps)
