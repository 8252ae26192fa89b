"""The hooks through which LoRA adapters change a linear layer or a table. `octavo.worker_proc.lora` fills them.

A layer calls its hook `add`, so a model without adapters computes only its own products.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.lora import LoraSlots
from octavo.kernels.lora.rows import AdapterRows
from octavo.worker_proc.parallel.sharding import Shard, Sharding


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """The weights of all experts of a layer that PEFT treats as one module, because they are one parameter."""

    split_stack: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
    """Splits such a tensor of a checkpoint."""
    is_turned: bool
    """Whether its matrices have shape (inputs, outputs)."""

    def split(self, name: str, b_EOR: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return the factor B of each weight."""
        return self.split_stack(name, b_EOR.mT if self.is_turned else b_EOR)


class LayerAdapters:
    """The adapters of one layer.

    Args:
        num_inputs: number of inputs of this rank; for a table, its rows.
        parts: checkpoint names of the layers that are stacked into this one, and each one's number of outputs here.
        shards: the shard of each part that this rank holds; `None` means all of it.
        is_table: whether the layer is an embedding.
        first_id: first id of the table.
        is_here: whether the layer belongs to this pipeline stage.
        input_sharding: how ranks, possibly just one, divide the inputs; `None` if they are never divided.
        num_experts: number of experts, each with equally many parts, expert by expert.
        own_experts: indices of the experts that are here; `None` if it is a layer by itself.
    """

    def __init__(
        self,
        num_inputs: int,
        parts: Mapping[str, int],
        shards: Mapping[str, Shard | None],
        *,
        is_table: bool = False,
        first_id: int = 0,
        is_here: bool,
        input_sharding: Sharding | None = None,
        num_experts: int = 1,
        own_experts: range | None = None,
    ) -> None:
        self.num_inputs = num_inputs
        self.parts = parts
        self.shards = shards
        self.is_table = is_table
        self.first_id = first_id
        self.is_here = is_here
        self.input_sharding = input_sharding
        self.num_experts = num_experts
        self.is_mixture = own_experts is not None
        self.own_experts = range(1) if own_experts is None else own_experts
        self.slots: LoraSlots | None = None
        """Adapter slots of experts, which do not call `add`; `None` if the engine has no adapters."""
        self.rows: AdapterRows | None = None
        """Adapter of each token, for experts."""
        self.follows_exchange = False
        """Whether `add` gets the combined products of all ranks."""
        self.add: Callable[[Tensor, Tensor], Tensor] | None = None
        """Maps the inputs and products of the layer to products with adapters; `None` if the engine has none. For a
        table, the inputs are token ids."""

    @property
    def own_parts(self) -> range:
        """Indices of the parts that are here."""
        count = len(self.parts) // self.num_experts
        return range(self.own_experts.start * count, self.own_experts.stop * count)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of outputs of each part that is here, for the layer or for one expert."""
        own = self.own_parts
        return tuple(self.parts.values())[own.start : own.start + len(own) // len(self.own_experts)]

    @property
    def has_divided_outputs(self) -> bool:
        """Whether other ranks hold other outputs of the layer."""
        return not self.is_table and any(shard is not None and shard.dim == 0 for shard in self.shards.values())

    def whole_shape(self, part: str) -> tuple[int, int]:
        """Return outputs and inputs of a part, over all ranks."""
        width, shard = self.parts[part], self.shards[part]
        rows, columns = (self.num_inputs, width) if self.is_table else (width, self.num_inputs)
        if shard is not None:
            rows, columns = shard.whole((rows, columns))
        return (columns, rows) if self.is_table else (rows, columns)
