"""Which layers a pipeline stage computes, and which weights it therefore holds.

Models build all of their layers and never meet a stage: `Parameters` gives the weights of other stages no memory, and
`Model` runs only the layers that are here.
"""

import re
from dataclasses import dataclass

from octavo.worker_proc.parallel.sharding import Role, role_of

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
"""The index of a layer in a checkpoint's names: "layers.3.self_attn.q_proj.weight"."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a model."""

    layers: range
    is_first: bool
    """It embeds the tokens."""
    is_last: bool
    """It computes the logits."""

    def holds(self, layer: str, *, is_output: bool) -> bool:
        """Return whether a weight is here. What lies between the layers is at both ends, but the large tables are not.

        Args:
            layer: the name of its layer in the checkpoint, without the prefix of the model.
            is_output: whether it is multiplied with; False: rows are looked up, or it scales them.
        """
        if found := _LAYER.search(f"{layer}."):
            return int(found[1]) in self.layers
        if role_of(layer) is Role.VOCABULARY:
            return self.is_last if is_output else self.is_first
        return self.is_first or self.is_last


ALL_LAYERS = Stage(range(1 << 30), is_first=True, is_last=True)
"""Of a model that is not divided into stages."""
