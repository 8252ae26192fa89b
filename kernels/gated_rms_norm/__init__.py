"""Root-mean-square normalization of rows with a gate: the norm inside state-space and gated delta blocks."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.gated_rms_norm import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.gated_rms_norm,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.gated_rms_norm.gpu", cpu.gated_rms_norm),
}
_SUMS = {"cpu": cpu.gated_square_sums, "recorded": native.record_sums}


def gated_rms_norm(
    x_TD: Tensor,
    gate_TD: Tensor,
    weight: Tensor,
    eps: float,
    *,
    num_groups: int = 1,
    is_gate_first: bool,
    num_segments: int = 1,
    sums_TR: Tensor | None = None,
) -> Tensor:
    """Return `norm(x * silu(gate))` if the gate is first, otherwise `norm(x) * silu(gate)`, in the dtype of `x`.

    The norm scales each of `num_groups` equal parts of a row to unit root mean square, then by `weight`. Computed in
    float32.

    Args:
        x_TD: rows.
        gate_TD: gates, in the shape of `x_TD`.
        weight: weights of a complete row, or of one part and then used for all parts.
        eps: added to the mean of squares.
        num_groups: number of parts of a row.
        is_gate_first: whether the gate comes before the norm.
        num_segments: a power of two. A group's squares are summed within this many segments; the two halves
            of the segments' sums are then added repeatedly, until one sum is left.
        sums_TR: `gated_square_sums` of all ranks that share the only group, in rank order; `None` if this rank has
            complete groups.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    width = x_TD.shape[1]
    require(
        gate_TD.shape == x_TD.shape
        and width % (num_groups * num_segments) == 0
        and len(weight) in (width, width // num_groups)
        and (sums_TR is None or (num_groups == 1 and sums_TR.shape[0] == x_TD.shape[0])),
        f"gated_rms_norm: rows {tuple(x_TD.shape)}, gates {tuple(gate_TD.shape)}, {len(weight)} weights, "
        f"{num_groups} groups of {num_segments} segments",
    )
    implementation = choose("gated_rms_norm", _IMPLEMENTATIONS, x_TD.device)
    return implementation(
        x_TD,
        gate_TD,
        weight,
        eps,
        num_groups=num_groups,
        is_gate_first=is_gate_first,
        num_segments=num_segments,
        sums_TR=sums_TR,
    )


def gated_square_sums(x_TD: Tensor, gate_TD: Tensor, *, is_gate_first: bool, num_segments: int = 1) -> Tensor:
    """Return each row's sum of squares of the numbers that `gated_rms_norm` scales, float32, shape (T, 1).

    For a group that is divided equally among ranks; `num_segments` are the segments on this rank.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        gate_TD.shape == x_TD.shape and x_TD.shape[1] % num_segments == 0,
        f"gated_square_sums: rows {tuple(x_TD.shape)}, gates {tuple(gate_TD.shape)}, {num_segments} segments",
    )
    implementation = choose("gated_square_sums", _SUMS, x_TD.device)
    return implementation(x_TD, gate_TD, is_gate_first=is_gate_first, num_segments=num_segments)
