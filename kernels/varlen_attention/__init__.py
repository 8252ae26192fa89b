"""Attention without a mask over the parts of a packed sequence, as in vision and audio towers. Knows no cache."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.varlen_attention import reference
from octavo.kernels.varlen_attention.parts import Parts as Parts

_IMPLEMENTATIONS = {
    "cpu": reference.varlen_attention,
    "cuda": lazy("octavo.kernels.varlen_attention.gpu", reference.varlen_attention),
}


def varlen_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, parts: Parts, scale: float) -> Tensor:
    """Return out_TNH, in which each row has attended to all keys of its part. On a GPU H is at most 128.

    Scores and sums are float32. Keys are taken in tiles that are anchored at the beginning of a part and added in
    order, so the result for a row depends on the rows of its part alone.

    Args:
        q_TNH, k_TNH, v_TNH: views of one product, or tensors of their own.
        parts: the division of the T rows.
        scale: factor of the scores.

    Raises:
        ShapeError: the shapes do not match, or the parts are not those of T rows.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        q_TNH.shape == k_TNH.shape == v_TNH.shape and len(q_TNH) == parts.num_rows,
        f"varlen_attention: {tuple(q_TNH.shape)}, {tuple(k_TNH.shape)} and {tuple(v_TNH.shape)} for parts of "
        f"{parts.num_rows} rows",
    )
    return choose("varlen_attention", _IMPLEMENTATIONS, q_TNH.device)(q_TNH, k_TNH, v_TNH, parts, scale)
