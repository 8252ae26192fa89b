"""The recurrence of Mamba-2 (Dao and Gu, arXiv 2405.21060): a matrix per head, decayed by a scalar at each token."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.recurrence import Slots
from octavo.kernels.selective_scan import cpu, native
from octavo.kernels.selective_scan.weights import ScanWeights as ScanWeights

_IMPLEMENTATIONS = {
    "cpu": cpu.selective_scan,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.selective_scan.gpu", cpu.selective_scan),
}


def selective_scan(
    x_TP: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    dt_TH: Tensor,
    weights: ScanWeights,
    state_SHNP: Tensor,
    slots: Slots,
) -> Tensor:
    """Return the outputs of all heads, in the shape and dtype of `x`.

    For each head and token, with `dt = clamp(softplus(dt + dt_bias))` and the B and C of the head's group:

        state = exp(-exp(a_log) * dt) * state + outer(B, dt * x)
        y = C @ state + skip * x

    Computed in float32, token by token.

    Args:
        x_TP: heads of P numbers, side by side.
        b_TN: groups of N numbers, side by side; heads are divided among the groups in order.
        c_TN: same layout as `b_TN`.
        dt_TH: a number for each head.
        weights: the weights of the heads.
        state_SHNP: float32; updated in place.
        slots: state that each request reads and writes.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    num_heads, state_size, head_dim = state_SHNP.shape[1:]
    num_groups = b_TN.shape[1] // state_size
    require(
        x_TP.shape[1] == num_heads * head_dim
        and b_TN.shape[1] == c_TN.shape[1] == num_groups * state_size
        and num_groups > 0
        and num_heads % num_groups == 0
        and dt_TH.shape[1] == num_heads
        and weights.num_heads == num_heads,
        f"selective_scan: rows {tuple(x_TP.shape)}, {tuple(b_TN.shape)}, {tuple(c_TN.shape)} and {tuple(dt_TH.shape)} "
        f"for {weights.num_heads} heads and states {tuple(state_SHNP.shape)}",
    )
    implementation = choose("selective_scan", _IMPLEMENTATIONS, x_TP.device)
    return implementation(x_TP, b_TN, c_TN, dt_TH, weights, state_SHNP, slots)
