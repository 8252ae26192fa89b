"""How workers divide the adapters of a layer, and what they exchange. Native programs get the bits of one worker."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from octavo.kernels.lora.shape import LoraShape
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.layers.adapters import LayerAdapters
from octavo.worker_proc.parallel.group import TensorParallelGroup
from octavo.worker_proc.parallel.sharding import Sharding

Exchange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A worker's part of the adapters of one layer."""

    shape: LoraShape
    exchange: Exchange | None = None
    """See `octavo.kernels.lora.new_slots`. `None` if this worker has all of A, or if the workers add up their products
    with B."""
    outputs: range | None = None
    """The outputs whose rows of B are here, if the layer's inputs are divided. `None` if all are here."""
    gather_outputs: Exchange | None = None
    """From these outputs to those of all workers. `None` if each worker adds its outputs to its part of the layer's
    product, which the workers add up afterwards."""
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
    if layer.is_mixture:  # each adds what its own inputs give
        return Division(shape)
    if sharding is None:
        if not (is_fully_sharded and group is not None and layer.has_divided_outputs):
            return Division(shape)
        own = model.parameters.sharding
        gather = partial(_gathered, group=group, rank=own.rank, size=own.size)
        return Division(replace(shape, a_part=own.rank, num_a_parts=own.size), gather)
    if model.library is None:
        if not is_fully_sharded or group is None or sharding.size == 1:  # each adds what its own inputs give
            return Division(shape)
        outputs = _own_outputs(shape, sharding)
        return Division(replace(shape, parts=(len(outputs),)), partial(_added, group=group), outputs)
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
    outputs = _own_outputs(shape, sharding)
    return Division(
        replace(shape, parts=(len(outputs),)),
        gather,
        outputs,
        partial(group.all_gather, first=outputs.start, width=shape.num_outputs),
        follows_exchange=True,
    )


def _own_outputs(shape: LoraShape, sharding: Sharding) -> range:
    """Return the outputs of a layer with divided inputs whose rows of B this worker has."""
    (width,) = shape.parts
    return range(width * sharding.rank // sharding.size, width * (sharding.rank + 1) // sharding.size)


def _added(sums_TX: Tensor, group: TensorParallelGroup) -> Tensor:
    return group.all_reduce(sums_TX, None, sums_TX.dtype)


def _gathered(sums_TX: Tensor, group: TensorParallelGroup, rank: int, size: int) -> Tensor:
    width = sums_TX.shape[1]
    return group.all_gather(sums_TX, rank * width, size * width)
