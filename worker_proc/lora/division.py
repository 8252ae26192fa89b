"""How workers divide the adapters of a layer, and what they exchange so that a request has the bits of one worker."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from octavo.kernels.lora.shape import LoraShape
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.layers.adapters import LayerAdapters
from octavo.worker_proc.parallel.group import TensorParallelGroup

Exchange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A worker's part of the adapters of one layer."""

    shape: LoraShape
    gather: Exchange | None = None
    """From the sums with this worker's part of A to those of all workers; `None` if it has all of A, or the workers add
    up their products with B."""
    outputs: range | None = None
    """The rows of B that are here, if the layer's inputs are divided; `None` means all."""
    gather_outputs: Exchange | None = None
    """From these outputs to those of all workers."""
    follows_exchange: bool = False
    """See `LayerAdapters`."""


def divide(layer: LayerAdapters, shape: LoraShape, model: Model, *, is_fully_sharded: bool) -> Division:
    """Return the part of a worker.

    Args:
        layer: layer of the model.
        shape: shape of the layer's slots, if it is not divided further than its weight.
        model: model whose ranks share the layer.
        is_fully_sharded: divide the factor whose dimension the weight does not divide, too.
    """
    sharding, group = layer.input_sharding, model.parameters.group
    if model.library is None or layer.is_mixture:  # each adds what its own inputs give
        return Division(shape)
    if sharding is None:
        if not (is_fully_sharded and group is not None and layer.has_divided_outputs):
            return Division(shape)
        own = model.parameters.sharding
        gather = partial(_gathered, group=group, rank=own.rank, size=own.size)
        return Division(replace(shape, a_part=own.rank, num_a_parts=own.size), gather)
    # The same segments on any number of ranks, as those of the layer's own products, give the same bits.
    num_segments = sharding.num_segments
    while num_segments > 1 and layer.num_inputs * sharding.size % (2 * num_segments):
        num_segments //= 2
    own_segments = num_segments // sharding.size if num_segments % sharding.size == 0 else 1
    shape = replace(shape, num_segments=own_segments, num_ranks=sharding.size)
    if sharding.size == 1 or group is None:
        return Division(shape)
    gather = partial(_gathered, group=group, rank=sharding.rank, size=sharding.size)
    if not is_fully_sharded:
        return Division(shape, gather, follows_exchange=True)
    (width,) = shape.parts
    starts = [width * rank // sharding.size for rank in (sharding.rank, sharding.rank + 1)]
    return Division(
        replace(shape, parts=(starts[1] - starts[0],)),
        gather,
        range(*starts),
        partial(group.all_gather, first=starts[0], width=width),
        follows_exchange=True,
    )


def _gathered(sums_TX: Tensor, group: TensorParallelGroup, rank: int, size: int) -> Tensor:
    width = sums_TX.shape[1]
    return group.all_gather(sums_TX, rank * width, size * width)
