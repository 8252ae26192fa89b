"""Random weights for tests and benchmarks: the same for the same names, seed and kind of device, in any order."""

import math
import zlib
from collections.abc import Container, Iterable

import torch
from torch import Tensor


def fill_dummy(
    parameters: Iterable[tuple[str, Tensor]], seed: int, *, rank: int = 0, divided: Container[str] = ()
) -> None:
    """Write random values into every parameter.

    Matrices are normal with a deviation of 1 / sqrt(columns), so that activations keep their size through
    the layers; scales of normalisations are near one and biases near zero.

    Args:
        parameters: parameters by name.
        seed: seed of the model.
        rank: rank that holds them.
        divided: names of the tensors of which each rank holds a different part.
    """
    for name, tensor in parameters:
        key = f"{seed} {name} {rank}" if rank and name in divided else f"{seed} {name}"
        # torch's generator on the CPU uses 32 bits of its seed. A GPU has its own.
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(key.encode()))
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        if tensor.dim() > 1:
            tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
        else:
            tensor.copy_(0.02 * noise + (0.0 if name.endswith("bias") else 1.0))
