"""The gated delta net of Qwen3-Next (Yang, Kautz and Hatamizadeh, arXiv 2412.06464)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels.causal_conv1d import causal_conv1d
from octavo.kernels.gated_delta_rule import DeltaWeights, gated_delta_rule
from octavo.kernels.gated_rms_norm import gated_rms_norm
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.cache.groups import StateShape
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.checkpoint import Rule, split_rows, stacked
from octavo.worker_proc.models.layers.devices import check_recurrent
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """Sizes of a block."""

    num_key_heads: int
    num_value_heads: int
    """Number of value heads: a multiple of the number of key heads."""
    key_dim: int
    value_dim: int
    conv_width: int

    def of_rank(self, num_ranks: int) -> "DeltaNetSizes":
        """Return the sizes of one rank's part, given those of the undivided block."""
        return replace(
            self,
            num_key_heads=max(1, self.num_key_heads // num_ranks),
            num_value_heads=self.num_value_heads // num_ranks,
        )

    @property
    def convolved(self) -> list[int]:
        """Widths of the convolved parts: queries, keys, values."""
        key_width = self.num_key_heads * self.key_dim
        return [key_width, key_width, self.num_value_heads * self.value_dim]

    @property
    def state(self) -> StateShape:
        """State of a request: the last inputs of the convolution, and the matrix of each value head."""
        heads = self.num_value_heads, self.key_dim, self.value_dim
        return StateShape(((self.conv_width - 1, sum(self.convolved)), heads))


class GatedDeltaNet:
    """Input projection, convolution, recurrence, norm with gate of each head, output projection.

    Args:
        parameters: parameters of the model.
        name: name of the block; its tensors are those of `divided_projections`, `A_log`, `dt_bias`, `norm` and
            `out_proj`.
        index: index of the layer.
        sizes: sizes of the block, or of a rank's part of it.
        width: width of the residual stream.
        eps: epsilon of the norm.

    Raises:
        ConfigError: see `check_recurrent`.
    """

    def __init__(
        self, parameters: Parameters, name: str, index: int, sizes: DeltaNetSizes, width: int, *, eps: float
    ) -> None:
        check_recurrent(parameters)
        self._index = index
        self._sizes = sizes
        self._eps = eps
        num_channels, num_heads, value_width = sum(sizes.convolved), sizes.num_value_heads, sizes.convolved[2]
        self._widths = [num_channels, value_width, num_heads, num_heads]
        outputs = [*sizes.convolved, value_width, num_heads, num_heads]
        parts = {f"{name}.in_proj_{part}": size for part, size in zip("qkvzba", outputs, strict=True)}
        self._in = Linear.stacked(parameters, f"{name}.in_proj", parts, width, bias=False)
        parts = {f"{name}.{part}.weight": size for part, size in _convolutions(sizes).items()}
        self._conv_weight_D1W = parameters.stacked(f"{name}.conv1d.weight", parts, 1, sizes.conv_width)
        a_log_H, dt_bias_H = (
            parameters.new(f"{name}.{part}", num_heads, dtype=torch.float32) for part in ("A_log", "dt_bias")
        )
        self._rule = DeltaWeights(a_log_H, dt_bias_H)
        self._norm_weight_V = parameters.new(f"{name}.norm.weight", sizes.value_dim)
        self._out = Linear.new(parameters, f"{name}.out_proj", value_width, width, bias=False)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        qkv, gate_TV, b_TH, a_TH = self._in(x_TD).split(self._widths, dim=1)
        state = attention.state(self._index)
        conv_state, rule_state = state.tensors
        qkv = causal_conv1d(qkv, self._conv_weight_D1W.squeeze(1), None, conv_state, state.slots, has_silu=True)
        q_TK, k_TK, v_TV = qkv.split(self._sizes.convolved, dim=1)
        y_TV = gated_delta_rule(q_TK, k_TK, v_TV, b_TH, a_TH, self._rule, rule_state, state.slots)
        num_heads = self._sizes.num_value_heads
        return self._out(
            gated_rms_norm(y_TV, gate_TV, self._norm_weight_V, self._eps, num_groups=num_heads, is_gate_first=False)
        )


def divided_projections(sizes: DeltaNetSizes) -> list[Rule]:
    """Return the rules that split the fused tensors of a checkpoint, so that ranks can divide each part.

    These are `conv1d`, `in_proj_qkvz` (for each key head: its query, its key, and the values and gates of its value
    heads) and `in_proj_ba`, in which the projections of each key head are adjacent too.
    Args:
        sizes: sizes of the undivided block.
    """
    num_heads, per_key = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads

    def rows(widths: list[int]) -> list[list[range]]:
        """Return the rows of each part, given its number of rows per key head."""
        starts = [sum(widths[:part]) for part in range(len(widths))]
        return [
            [range(head * sum(widths) + start, head * sum(widths) + start + width) for head in range(num_heads)]
            for start, width in zip(starts, widths, strict=True)
        ]

    value_rows = per_key * sizes.value_dim
    q, k, v, z = rows([sizes.key_dim, sizes.key_dim, value_rows, value_rows])
    b, a = rows([per_key, per_key])
    return [
        split_rows("in_proj_qkvz", {"in_proj_q": q, "in_proj_k": k, "in_proj_v": v, "in_proj_z": z}),
        split_rows("in_proj_ba", {"in_proj_b": b, "in_proj_a": a}),
        split_rows("conv1d", stacked(_convolutions(sizes))),
    ]


def _convolutions(sizes: DeltaNetSizes) -> dict[str, int]:
    """Return the parts of `conv1d`, and the number of channels of each."""
    return dict(zip(("conv1d_q", "conv1d_k", "conv1d_v"), sizes.convolved, strict=True))
