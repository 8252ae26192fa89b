"""Where LoRA adapters are added to a linear layer, or to a table. `octavo.worker_proc.lora` fills them.

A layer calls what is at `add`, so a model without adapters computes nothing else than its products.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.lora import LoraSlots
from octavo.kernels.lora.rows import AdapterRows
from octavo.worker_proc.parallel.sharding import Shard, Sharding


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """The weights of all experts of a layer, of which PEFT makes one module: a parameter of theirs."""

    split_stack: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
    """Takes such a tensor of a checkpoint apart."""
    is_turned: bool
    """It holds matrices of inputs by outputs."""

    def split(self, name: str, b_EOR: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return the factor B of each weight."""
        return self.split_stack(name, b_EOR.mT if self.is_turned else b_EOR)


class LayerAdapters:
    """The place of the adapters of one layer.

    Args:
        num_inputs: here; of a table, its rows.
        parts: names in the checkpoint of the layers that are stacked into this one, and the outputs of each, here.
        shards: the part of each that this rank holds; `None` means all of it.
        is_table: whether the layer is an embedding.
        first_id: first id of the table.
        is_here: False: another pipeline stage has the layer.
        input_sharding: the ranks that divide the inputs, be it only one; `None` if they are never divided.
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
        """Of experts, which do not call `add`; `None` if the engine has no adapters."""
        self.rows: AdapterRows | None = None
        """Of experts: which token has which adapter."""
        self.follows_exchange = False
        """Whether `add` gets the products of all ranks together."""
        self.add: Callable[[Tensor, Tensor], Tensor] | None = None
        """From the inputs and the products of the layer to products with adapters; `None` if the engine has none. A
        table gets token ids as inputs."""

    @property
    def own_parts(self) -> range:
        """Which parts are here."""
        count = len(self.parts) // self.num_experts
        return range(self.own_experts.start * count, self.own_experts.stop * count)

    @property
    def widths(self) -> tuple[int, ...]:
        """Outputs of the parts here of the layer, or of one expert."""
        own = self.own_parts
        return tuple(self.parts.values())[own.start : own.start + len(own) // len(self.own_experts)]

    @property
    def has_divided_outputs(self) -> bool:
        """Whether other ranks have other outputs of the layer."""
        return not self.is_table and any(shard is not None and shard.dim == 0 for shard in self.shards.values())

    def whole_shape(self, part: str) -> tuple[int, int]:
        """Return outputs and inputs of a part, of all ranks together."""
        width, shard = self.parts[part], self.shards[part]
        rows, columns = (self.num_inputs, width) if self.is_table else (width, self.num_inputs)
        if shard is not None:
            rows, columns = shard.whole((rows, columns))
        return (columns, rows) if self.is_table else (rows, columns)
