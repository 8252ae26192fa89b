"""The state-space block of Mamba-2 (Dao and Gu, arXiv 2405.21060), also used in hybrid models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.causal_conv1d import causal_conv1d
from octavo.kernels.gated_rms_norm import gated_rms_norm, gated_square_sums
from octavo.kernels.multiply import multiply
from octavo.kernels.pointwise import scale
from octavo.kernels.selective_scan import ScanWeights, selective_scan
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.cache.groups import StateShape
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.checkpoint import Rule, split_rows, stacked
from octavo.worker_proc.models.layers.devices import check_recurrent
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Mamba2Sizes:
    """Sizes of a block."""

    num_heads: int
    head_dim: int
    state_size: int
    """Size of B and C of a group."""
    num_groups: int
    """Number of head groups. The heads of a group share B and C, and are normalized together."""
    conv_width: int
    num_sharing: int = 1
    """Number of ranks that share a group: each has some of its heads."""

    def of_rank(self, num_ranks: int) -> "Mamba2Sizes":
        """Return the sizes of one rank's part, given those of the undivided block."""
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_groups=max(1, self.num_groups // num_ranks),
            num_sharing=max(1, num_ranks // self.num_groups),
        )

    @property
    def inner_width(self) -> int:
        """Total width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> list[int]:
        """Widths of the convolved parts: the heads, all B, all C."""
        return [self.inner_width, self.num_groups * self.state_size, self.num_groups * self.state_size]

    @property
    def state(self) -> StateShape:
        """State of a request: the last inputs of the convolution, and the matrix of each head."""
        heads = self.num_heads, self.state_size, self.head_dim
        return StateShape(((self.conv_width - 1, sum(self.convolved)), heads))


@dataclass(frozen=True, slots=True)
class Mamba2Factors:
    """Factors of the outputs of the input projection (Falcon-H1)."""

    gate: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0


class Mamba2Mixer:
    """Input projection, convolution, recurrence, gated norm, output projection.

    Args:
        parameters: parameters of the model.
        name: name of the block; its tensors are `in_proj`, `conv1d`, both divided by `divided_projections`, `A_log`,
            `D`, `dt_bias`, `norm` and `out_proj`.
        index: index of the layer.
        sizes: sizes of the block, or of a rank's part of it.
        width: width of the residual stream.
        eps: epsilon of the norm.
        norm: whether the gate comes before or after the norm; `None` if there is a gate and no norm.
        has_bias: whether the input projection has a bias.
        has_output_bias: whether the output projection has a bias.
        has_conv_bias: whether the convolution has a bias.
        dt_limits: limits of the step sizes.
        factors: factors of the input projection.

    Raises:
        ConfigError: see `check_recurrent`.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        index: int,
        sizes: Mamba2Sizes,
        width: int,
        *,
        eps: float,
        norm: Literal["gate_first", "norm_first"] | None = "gate_first",
        has_bias: bool = False,
        has_output_bias: bool = False,
        has_conv_bias: bool = True,
        dt_limits: tuple[float, float] = (0.0, math.inf),
        factors: Mamba2Factors = Mamba2Factors(),
    ) -> None:
        check_recurrent(parameters)
        self._index = index
        self._sizes = sizes
        self._eps = eps
        self._norm = norm
        self._sharding, self._group = parameters.sharding, parameters.group
        self._factors = factors
        num_channels, num_heads = sum(sizes.convolved), sizes.num_heads
        self._widths = [sizes.inner_width, num_channels, num_heads]
        parts = {f"{name}.{part}": rows for part, rows in _projections(sizes).items()}
        self._in = Linear.stacked(parameters, f"{name}.in_proj", parts, width, bias=has_bias)
        weights, biases = (
            {f"{name}.{part}.{kind}": rows for part, rows in _convolutions(sizes).items()}
            for kind in ("weight", "bias")
        )
        self._conv_weight_D1W = parameters.stacked(f"{name}.conv1d.weight", weights, 1, sizes.conv_width)
        self._conv_bias_D = parameters.stacked(f"{name}.conv1d.bias", biases) if has_conv_bias else None
        self._scaled_weight_DW: Tensor | None = None
        parameters.derived.append(self._refresh)
        a_log_H, dt_bias_H, skip_H = (
            parameters.new(f"{name}.{part}", num_heads, dtype=torch.float32) for part in ("A_log", "dt_bias", "D")
        )
        self._scan = ScanWeights(a_log_H, dt_bias_H, skip_H, *dt_limits)
        self._norm_weight_P = parameters.new(f"{name}.norm.weight", sizes.inner_width) if norm else None
        self._out = Linear.new(parameters, f"{name}.out_proj", sizes.inner_width, width, bias=has_output_bias)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        gate_TP, convolved, dt_TH = self._in(x_TD).split(self._widths, dim=1)
        if self._factors.gate != 1.0:
            gate_TP = scale(gate_TP, self._factors.gate)
        if self._factors.dt != 1.0:
            dt_TH = scale(dt_TH, self._factors.dt)
        state = attention.state(self._index)
        conv_state, scan_state = state.tensors
        convolved = causal_conv1d(
            convolved, self._conv_weight(), self._conv_bias_D, conv_state, state.slots, has_silu=True
        )
        x_TP, b_TN, c_TN = convolved.split(self._sizes.convolved, dim=1)
        y_TP = selective_scan(x_TP, b_TN, c_TN, dt_TH, self._scan, scan_state, state.slots)
        return self._out(self._gated(y_TP, gate_TP))

    def _gated(self, y_TP: Tensor, gate_TP: Tensor) -> Tensor:
        """Return the outputs of all heads after the gate, and the norm if there is one."""
        if self._norm_weight_P is None:
            return multiply(y_TP, gate_TP, has_silu=True)
        is_gate_first, num_segments = self._norm == "gate_first", self._num_segments()
        sums_TR = None
        if (num_sharing := self._sizes.num_sharing) > 1:
            assert self._group is not None, "a part of a group on one rank among several"
            rank, size = self._sharding.rank, self._sharding.size
            own_T1 = gated_square_sums(y_TP, gate_TP, is_gate_first=is_gate_first, num_segments=num_segments)
            first = rank // num_sharing * num_sharing
            sizes = [first, num_sharing, size - first - num_sharing]
            sums_TR = self._group.all_gather(own_T1, rank, size).split(sizes, dim=1)[1]
        return gated_rms_norm(
            y_TP,
            gate_TP,
            self._norm_weight_P,
            self._eps,
            num_groups=self._sizes.num_groups,
            is_gate_first=is_gate_first,
            num_segments=num_segments,
            sums_TR=sums_TR,
        )

    def _num_segments(self) -> int:
        """Return the number of segments in which the squares of a group, or of this rank's part of it, are summed.

        The segments are the same on any number of ranks, as those of products are, and so is the order of the sum.
        """
        num_parts = self._sizes.num_groups * self._sharding.size
        return self._sharding.num_segments // num_parts if self._sharding.num_segments % num_parts == 0 else 1

    def _conv_weight(self) -> Tensor:
        """Return the weights with the factors of their inputs, computed in the first step."""
        weight_DW = self._conv_weight_D1W.squeeze(1)
        factors = [self._factors.x, self._factors.b, self._factors.c]
        if factors == [1.0, 1.0, 1.0]:
            return weight_DW
        if self._scaled_weight_DW is None:
            self._scaled_weight_DW = self._scaled(weight_DW, factors)
        return self._scaled_weight_DW

    def _scaled(self, weight_DW: Tensor, factors: Sequence[float]) -> Tensor:
        parts = weight_DW.float().split(self._sizes.convolved)
        return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)])

    def _refresh(self) -> None:
        """Recompute cached values after weights have changed in place."""
        if (scaled_DW := self._scaled_weight_DW) is not None:
            factors = [self._factors.x, self._factors.b, self._factors.c]
            scaled_DW.copy_(self._scaled(self._conv_weight_D1W.squeeze(1), factors))


def divided_projections(sizes: Mamba2Sizes) -> list[Rule]:
    """Return the rules that split the fused tensors of a checkpoint, so that ranks can divide each part.

    `sizes`: sizes of the undivided block.
    """
    return [
        split_rows("in_proj", stacked(_projections(sizes))),
        split_rows("conv1d", stacked(_convolutions(sizes))),
    ]


def _projections(sizes: Mamba2Sizes) -> dict[str, int]:
    """Return the parts of `in_proj`, and the number of outputs of each."""
    x, b, c = sizes.convolved
    return {"gate_proj": x, "x_proj": x, "state_b_proj": b, "state_c_proj": c, "dt_proj": sizes.num_heads}


def _convolutions(sizes: Mamba2Sizes) -> dict[str, int]:
    """Return the parts of `conv1d`, and the number of channels of each."""
    return dict(zip(("conv1d_x", "conv1d_b", "conv1d_c"), sizes.convolved, strict=True))
