"""Multi-head latent attention (DeepSeek): queries and keys as the cache has them, with one key for all heads.

A key is the latent vector of a token, which is also its value, and then a rotated part. Queries have been multiplied
with the part of the weights that would make a head's key of the vector: the products are the same (arXiv 2405.04434,
2.1.2). Attends to nothing.
"""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.latent_heads import cpu, native
from octavo.kernels.latent_heads.widths import LatentWidths as LatentWidths

_IMPLEMENTATIONS = {
    "cpu": cpu.latent_heads,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.latent_heads.gpu", cpu.latent_heads),
}


def latent_heads(
    q_TNP: Tensor,
    q_latent_TM: Tensor,
    latent_TL: Tensor,
    k_rotary_TR: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    widths: LatentWidths,
) -> tuple[Tensor, Tensor]:
    """Return q_TNH and k_T1H, each with the latent part before the rotated part.

    Args:
        q_TNP: query heads: the part without rotation, which is not read, then the part to rotate.
        q_latent_TM: the latent part of the queries, already multiplied; M is N * L, the latent parts of all heads.
        latent_TL: the latent vectors.
        k_rotary_TR: the part to rotate of the key that all heads share.
        cos_TC: float32 cosines of the angles of the pairs (2c, 2c + 1), or (c, c + C); see `LatentWidths`.
        sin_TC: float32 sines of the same angles.
        widths: the widths of the parts.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        q_TNP.ndim == 3
        and q_TNP.shape[2] == widths.query
        and q_latent_TM.shape[1] == q_TNP.shape[1] * widths.latent
        and latent_TL.shape[1] == widths.latent
        and k_rotary_TR.shape[1] == widths.rotary == 2 * cos_TC.shape[1]
        and cos_TC.shape == sin_TC.shape,
        f"latent_heads: queries {tuple(q_TNP.shape)}, latent parts {tuple(q_latent_TM.shape)} for {widths}",
    )
    implementation = choose("latent_heads", _IMPLEMENTATIONS, q_TNP.device)
    return implementation(q_TNP, q_latent_TM, latent_TL, k_rotary_TR, cos_TC, sin_TC, widths)
