"""A linear layer, and the creation of its parameters."""

from torch import Tensor

from octavo.kernels.linear import linear, linear_silu_and_mul
from octavo.kernels.silu_and_mul import silu_and_mul
from octavo.worker_proc.models.layers.adapters import LayerAdapters
from octavo.worker_proc.models.linear_weight import LinearWeight
from octavo.worker_proc.models.parameters import Parameters


class Linear:
    """`x @ weight.T + bias`; usable once its weight is packed.

    Args:
        weight: weight of the layer.
        adapters: adds the LoRA products of rows; `None` if adapters cannot change the layer.
    """

    def __init__(self, weight: LinearWeight, adapters: LayerAdapters | None = None) -> None:
        self._weight = weight
        self._adapters = adapters

    @classmethod
    def tied(cls, parameters: Parameters, embedding_VD: Tensor) -> "Linear":
        """Make the output layer of a model that shares its weight with the embedding."""
        weight = parameters.tied(embedding_VD)
        (table,) = weight.parts
        shards = {"lm_head": parameters.shard_of(table)}
        parts = {"lm_head": weight.num_outputs}
        is_here = parameters.stage.is_last
        return cls(weight, parameters.adapts(LayerAdapters(weight.num_inputs, parts, shards, is_here=is_here)))

    @classmethod
    def new(
        cls, parameters: Parameters, name: str, inputs: int, outputs: int, *, bias: bool, is_transposed: bool = False
    ) -> "Linear":
        """Make the layer that the checkpoint calls `name`.

        `is_transposed`: whether the weight in the checkpoint has shape IO instead of OI.
        """
        weight = parameters.linear(name, {name: outputs}, inputs, bias=bias, is_transposed=is_transposed)
        return cls(weight, adapters_of(parameters, weight))

    @classmethod
    def stacked(cls, parameters: Parameters, name: str, parts: dict[str, int], inputs: int, *, bias: bool) -> "Linear":
        """Make one layer from several of the checkpoint. `parts` maps their names to their numbers of outputs."""
        weight = parameters.linear(name, parts, inputs, bias=bias)
        return cls(weight, adapters_of(parameters, weight))

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the outputs, shape TO."""
        product_TO = linear(x_TI, self._weight.packed)
        adapters, exchange = self._adapters, self._weight.exchange
        if adapters is None or adapters.add is None:
            return product_TO if exchange is None else exchange(product_TO)
        if exchange is None:
            return adapters.add(x_TI, product_TO)
        if adapters.follows_exchange:
            return adapters.add(x_TI, exchange(product_TO))
        return exchange(adapters.add(x_TI, product_TO))

    def silu_and_mul(self, x_TI: Tensor) -> Tensor:
        """Return the gated activation of the outputs, half as many; see `octavo.kernels.silu_and_mul`."""
        assert self._weight.exchange is None, "the activation of partial sums is not a part of the activation"
        if self._adapters is not None and self._adapters.add is not None:
            return silu_and_mul(self._adapters.add(x_TI, linear(x_TI, self._weight.packed)))
        return linear_silu_and_mul(x_TI, self._weight.packed)


def adapters_of(parameters: Parameters, weight: LinearWeight) -> LayerAdapters:
    """Register that adapters can change a layer. Return its adapter hook."""
    shards = {part: parameters.shard_of(f"{part}.weight") for part in weight.parts}
    is_here = parameters.stage.holds(weight.name, is_output=True)
    return parameters.adapts(
        LayerAdapters(weight.num_inputs, weight.parts, shards, is_here=is_here, input_sharding=weight.input_sharding)
    )
