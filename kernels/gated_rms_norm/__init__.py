"""Root-mean-square normalization of rows with a gate: the norm inside state-space and gated delta blocks."""

from torch import Tensor

from octavo.kernels.dispatch import choose, require
from octavo.kernels.gated_rms_norm import cpu, native

_IMPLEMENTATIONS = {"cpu": cpu.gated_rms_norm, "recorded": native.record}


def gated_rms_norm(
    x_TD: Tensor, gate_TD: Tensor, weight: Tensor, eps: float, *, num_groups: int = 1, is_gate_first: bool
) -> Tensor:
    """Return `norm(x * silu(gate))` if the gate is first, otherwise `norm(x) * silu(gate)`, in the dtype of `x`.

    The norm scales each of `num_groups` equal parts of a row to unit root mean square, then by `weight`. Computed in
    float32.

    Args:
        x_TD: rows.
        gate_TD: the same shape.
        weight: of a whole row, or of one part and used for all of them.
        eps: added to the mean of squares.
        num_groups: parts of a row.
        is_gate_first: whether the gate comes before the norm.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    width = x_TD.shape[1]
    require(
        gate_TD.shape == x_TD.shape and width % num_groups == 0 and len(weight) in (width, width // num_groups),
        f"gated_rms_norm: rows {tuple(x_TD.shape)}, gates {tuple(gate_TD.shape)}, {len(weight)} weights, "
        f"{num_groups} groups",
    )
    implementation = choose("gated_rms_norm", _IMPLEMENTATIONS, x_TD.device)
    weight_D = weight.repeat(width // len(weight))
    return implementation(x_TD, gate_TD, weight_D, eps, num_groups=num_groups, is_gate_first=is_gate_first)
