"""Placement of a model's tensors: their type, their device, and the part of them that this rank holds."""

from dataclasses import dataclass

import torch

from octavo.kernels.experts import ExpertExchange
from octavo.worker_proc.parallel.group import TensorParallelGroup
from octavo.worker_proc.parallel.sharding import WHOLE, Sharding
from octavo.worker_proc.parallel.stages import ALL_LAYERS, Stage

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Placement:
    """Properties that all parameters of a model share."""

    dtype: torch.dtype
    """Type of all tensors; those of a checkpoint are converted."""
    device: torch.device = _CPU
    """Device of all tensors; those of a checkpoint are copied to it one by one."""
    sharding: Sharding = WHOLE
    """Part of the model that this rank holds."""
    group: TensorParallelGroup | None = None
    """Ranks that share every layer; `None` if this is the only one."""
    stage: Stage = ALL_LAYERS
    """Layers of this pipeline stage."""
    engines: ExpertExchange | None = None
    """Ranks of all engines, each with some experts; `None` if this engine has all experts."""
