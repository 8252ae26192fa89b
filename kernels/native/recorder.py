"""Records the operations of a model's `forward`; `program.build` builds the program from them."""

import torch

from octavo.kernels.add.native import record as record_add
from octavo.kernels.native.value import Ids, Node, Value, as_tensor, value_of


class ProgramRecorder:
    """The operations of one program, in call order."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.nodes: list[Node] = []
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self._dtype

    @property
    def token_ids(self) -> Ids:
        """The tokens of the step's rows."""
        return Ids(self, "token_ids")

    @property
    def positions(self) -> Ids:
        """The positions of the step's rows."""
        return Ids(self, "positions")

    def append(self, node: Node, dims: tuple[int, ...]) -> Value:
        """See `octavo.kernels.native.value.Recorder`."""
        self.nodes.append(node)
        return Value(self, node.outputs[0], 0, dims)

    def append_effect(self, node: Node) -> None:
        """See `octavo.kernels.native.value.Recorder`."""
        self.nodes.append(node)

    def add(self, left: Value, right: Value) -> Value:
        """See `octavo.kernels.native.value.Recorder`."""
        return value_of(record_add(as_tensor(left), as_tensor(right)))
