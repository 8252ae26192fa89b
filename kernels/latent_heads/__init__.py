"""Multi-head latent attention (DeepSeek): queries, keys and values of each head from what the projections return.

A head has a rotated part, which all heads share in the keys, and a part that is not rotated. Values are filled up with
zeros to the length of the keys, because the cache holds both in one form. Attends to nothing.
"""

from torch import Tensor

from octavo.kernels.dispatch import choose, require
from octavo.kernels.latent_heads import cpu, native
from octavo.kernels.latent_heads.widths import HeadWidths as HeadWidths

_SPLITS = {"cpu": cpu.latent_heads, "recorded": native.record}
_VALUES = {"cpu": cpu.latent_values, "recorded": native.record_values}


def latent_heads(
    q_TP: Tensor, kv_TP: Tensor, k_rotary_TR: Tensor, cos_TC: Tensor, sin_TC: Tensor, widths: HeadWidths
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_TNH, k_TNH and v_TNH: of each head the rotated part, then the other one; values, then zeros.

    Args:
        q_TP: of each head the part that is not rotated, then the rotated one.
        kv_TP: of each head the part of the key that is not rotated, then the value.
        k_rotary_TR: the rotated part of all keys, before the rotation.
        cos_TC: float32, as are the sines: of the pairs (2c, 2c + 1), or (c, c + C); see `HeadWidths`.
        sin_TC: the same.
        widths: of the parts.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    num_heads = q_TP.shape[1] // widths.head
    require(
        q_TP.shape[1] == num_heads * widths.head
        and kv_TP.shape[1] == num_heads * (widths.plain + widths.value)
        and k_rotary_TR.shape[1] == widths.rotary == 2 * cos_TC.shape[1]
        and cos_TC.shape == sin_TC.shape,
        f"latent_heads: queries {tuple(q_TP.shape)}, keys and values {tuple(kv_TP.shape)} for {widths}",
    )
    return choose("latent_heads", _SPLITS, q_TP.device)(q_TP, kv_TP, k_rotary_TR, cos_TC, sin_TC, widths)


def latent_values(out_TNH: Tensor, widths: HeadWidths) -> Tensor:
    """Return the heads of attention's output without what was filled up, side by side.

    Raises:
        ShapeError: the heads have another length.
        UnsupportedDevice: no implementation for the device.
    """
    require(out_TNH.ndim == 3 and out_TNH.shape[2] == widths.head, f"latent_values: heads {tuple(out_TNH.shape)}")
    return choose("latent_values", _VALUES, out_TNH.device)(out_TNH, widths)
