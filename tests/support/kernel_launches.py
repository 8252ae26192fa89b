"""The launches whose kernels are compiled ahead of time: every operation in the shapes of models in use.

Tensors have no data; the shapes are those of Llama-3.1-8B and Qwen3 unless said.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.gelu import gpu as gelu
from octavo.kernels.layer_norm import gpu as layer_norm
from octavo.kernels.quantize import gpu as quantize
from octavo.kernels.rms_norm import gpu as rms_norm
from octavo.kernels.rope import gpu as rope
from octavo.kernels.silu_and_mul import gpu as silu_and_mul
from octavo.kernels.store_kv import gpu as store_kv

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def store_in_blocks_of(block_size: int) -> None:
    """Store 8 tokens' keys and values, 8 heads of 128."""
    cache = empty(64, block_size, 8, 128)
    store_kv.store_kv(empty(8, 8, 128), empty(8, 8, 128), cache, cache, empty(8, dtype=I64))


LAUNCHES: dict[str, Callable[[], object]] = {
    "gelu": lambda: gelu.gelu(empty(8, 3072), False),
    "gelu, tanh": lambda: gelu.gelu(empty(8, 3072), True),
    "layer_norm, 4096": lambda: layer_norm.layer_norm(empty(8, 4096), empty(4096), empty(4096), 1e-5),
    "quantize, groups of 32": lambda: quantize.quantize(empty(8, 4096), 32),
    "rms_norm, 4096": lambda: rms_norm.rms_norm(empty(8, 4096), empty(4096), 1e-5),
    "rms_norm, 16384": lambda: rms_norm.rms_norm(empty(8, 16384), empty(16384), 1e-5),
    "rms_norm, heads of 128": lambda: rms_norm.rms_norm(empty(8, 32, 128), empty(128), 1e-6),
    "rope, 32 heads of 128": lambda: rope.rope(empty(8, 32, 128), empty(8, 64, dtype=F32), empty(8, 64, dtype=F32)),
    "silu_and_mul, 14336": lambda: silu_and_mul.silu_and_mul(empty(8, 2 * 14336)),
    "store_kv, blocks of 16": lambda: store_in_blocks_of(16),
}
