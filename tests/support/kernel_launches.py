"""The launches whose kernels are compiled ahead of time: every operation in the shapes of models in use.

Tensors have no data; the shapes are those of Llama-3.1-8B and Qwen3 unless said.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.rms_norm import gpu as rms_norm

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


LAUNCHES: dict[str, Callable[[], object]] = {
    "rms_norm, 4096": lambda: rms_norm.rms_norm(empty(8, 4096), empty(4096), 1e-5),
    "rms_norm, heads of 128": lambda: rms_norm.rms_norm(empty(8, 32, 128), empty(128), 1e-6),
}
