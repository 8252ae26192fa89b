"""Where the tensors of a model are: their type, their device, and the part of them that this rank holds."""

from dataclasses import dataclass

import torch

from octavo.kernels.experts import ExpertExchange
from octavo.worker_proc.parallel.group import TensorParallelGroup
from octavo.worker_proc.parallel.sharding import WHOLE, Sharding
from octavo.worker_proc.parallel.stages import ALL_LAYERS, Stage

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Placement:
    """What every parameter of a model has in common."""

    dtype: torch.dtype
    """Of all tensors; a checkpoint's are converted."""
    device: torch.device = _CPU
    """Where all tensors are, and a checkpoint's are copied to one by one."""
    sharding: Sharding = WHOLE
    """The part of the model that is here."""
    group: TensorParallelGroup | None = None
    """The ranks that share every layer; `None` if this is the only one."""
    stage: Stage = ALL_LAYERS
    """The layers that are here."""
    engines: ExpertExchange | None = None
    """The ranks of all engines, each with some experts; `None` if this engine has all experts."""
