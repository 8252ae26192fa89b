"""The state-space block of Mamba-2 (Dao and Gu, arXiv 2405.21060), which hybrids have too."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.causal_conv1d import causal_conv1d
from octavo.kernels.gated_rms_norm import gated_rms_norm
from octavo.kernels.multiply import multiply
from octavo.kernels.pointwise import scale
from octavo.kernels.selective_scan import ScanWeights, selective_scan
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.cache.groups import StateShape
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.layers.devices import check_recurrent
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Mamba2Sizes:
    """Of a block."""

    num_heads: int
    head_dim: int
    state_size: int
    """Of a group's B and C."""
    num_groups: int
    conv_width: int

    @property
    def inner_width(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> list[int]:
        """Widths of what is convolved: the heads, all B, all C."""
        return [self.inner_width, self.num_groups * self.state_size, self.num_groups * self.state_size]

    @property
    def state(self) -> StateShape:
        """What a request keeps: the last inputs of the convolution, and the matrix of each head."""
        heads = self.num_heads, self.state_size, self.head_dim
        return StateShape(((self.conv_width - 1, sum(self.convolved)), heads))


@dataclass(frozen=True, slots=True)
class Mamba2Factors:
    """Factors of what the input projection returns (Falcon-H1)."""

    gate: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0


class Mamba2Mixer:
    """Input projection, convolution, recurrence, gated norm, output projection.

    Args:
        parameters: of the model.
        name: of the block; its tensors are `in_proj`, `conv1d`, `A_log`, `D`, `dt_bias`, `norm` and `out_proj`.
        index: of the layer.
        sizes: of the block.
        width: of the residual stream.
        eps: of the norm.
        norm: whether the gate comes before the norm or after it; None: there is a gate and no norm.
        num_norm_groups: parts of a row that are normalized alone.
        has_bias: of the input projection.
        has_output_bias: of the output projection.
        has_conv_bias: of the convolution.
        dt_limits: of the step sizes.
        factors: of the input projection.

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
        num_norm_groups: int = 1,
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
        self._num_norm_groups = num_norm_groups
        self._factors = factors
        num_channels, num_heads = sum(sizes.convolved), sizes.num_heads
        self._widths = [sizes.inner_width, num_channels, num_heads]
        self._in = Linear.new(parameters, f"{name}.in_proj", width, sum(self._widths), bias=has_bias)
        self._conv_weight_D1W = parameters.new(f"{name}.conv1d.weight", num_channels, 1, sizes.conv_width)
        self._conv_bias_D = parameters.new(f"{name}.conv1d.bias", num_channels) if has_conv_bias else None
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
        if self._norm_weight_P is None:
            return self._out(multiply(y_TP, gate_TP, has_silu=True))
        return self._out(
            gated_rms_norm(
                y_TP,
                gate_TP,
                self._norm_weight_P,
                self._eps,
                num_groups=self._num_norm_groups,
                is_gate_first=self._norm == "gate_first",
            )
        )

    def _conv_weight(self) -> Tensor:
        """Return the weights with the factors of their inputs."""
        weight_DW = self._conv_weight_D1W.squeeze(1)
        factors = [self._factors.x, self._factors.b, self._factors.c]
        if factors == [1.0, 1.0, 1.0]:
            return weight_DW
        parts = weight_DW.float().split(self._sizes.convolved)
        return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)])
