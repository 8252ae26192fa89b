"""The arguments of `rope_store_kv` that a model chooses. Computes nothing."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QKNorm:
    """The norm of queries and keys, each head alone, before they are rotated: see `octavo.kernels.rms_norm`."""

    q_weight_H: Tensor
    k_weight_H: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """How the queries and keys of one layer are rotated and normalized in one step."""

    cos_TC: Tensor
    """Float32, as are the sines: see `octavo.kernels.rope`."""
    sin_TC: Tensor
    norm: QKNorm | None = None
