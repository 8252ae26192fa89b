"""Causal convolution of each channel over the tokens of a request (depthwise), with the last inputs as its state."""

from torch import Tensor

from octavo.kernels.causal_conv1d import cpu, native
from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.recurrence import Slots

MAX_WIDTH = 8
"""Maximum number of inputs of one output."""

_IMPLEMENTATIONS = {
    "cpu": cpu.causal_conv1d,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.causal_conv1d.gpu", cpu.causal_conv1d),
}


def causal_conv1d(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    state_SKD: Tensor,
    slots: Slots,
    *,
    has_silu: bool,
) -> Tensor:
    """Return `bias + sum_w weight[:, w] * x[t - W + 1 + w]`, through silu if `has_silu`, in the dtype of `x`.

    Computed in float32, the oldest input first.

    Args:
        x_TD: rows of the step.
        weight_DW: W weights of each channel; the last one is that of the row itself.
        bias_D: added first.
        state_SKD: float32; the last K = W - 1 inputs of each state, the oldest first. Updated in place.
        slots: state that each request reads and writes.
        has_silu: whether the activation silu follows.

    Raises:
        ShapeError: the shapes do not match, or W is not from 2 to `MAX_WIDTH`.
        UnsupportedDevice: no implementation for the device.
    """
    channels, width = weight_DW.shape
    require(
        2 <= width <= MAX_WIDTH and x_TD.shape[1] == channels and state_SKD.shape[1:] == (width - 1, channels),
        f"causal_conv1d: rows {tuple(x_TD.shape)}, weights {tuple(weight_DW.shape)}, states {tuple(state_SKD.shape)}",
    )
    implementation = choose("causal_conv1d", _IMPLEMENTATIONS, x_TD.device)
    return implementation(x_TD, weight_DW, bias_D, state_SKD, slots, has_silu=has_silu)
