"""The layers that a pipeline stage computes, the weights that it therefore holds, and the values that it passes on.

Models build all of their layers and do not know about stages: `Parameters` allocates no memory for weights of other
stages, and `Model` runs only the layers that are here.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.worker_proc.parallel.sharding import Role, role_of

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
"""The index of a layer in a checkpoint's names: "layers.3.self_attn.q_proj.weight"."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a model."""

    layers: range
    is_first: bool
    """Whether this stage embeds the tokens."""
    is_last: bool
    """Whether this stage computes the logits."""

    def holds(self, layer: str, *, is_output: bool) -> bool:
        """Return whether this stage holds a weight. Both ends hold the small weights outside of layers, but not the
        tables.

        Args:
            layer: name of its layer in the checkpoint, without the prefix of the model.
            is_output: whether the weight is used in a product; False: its rows are looked up, or it scales rows.
        """
        if (index := layer_of(f"{layer}.")) is not None:
            return index in self.layers
        if role_of(layer) is Role.VOCABULARY:
            return self.is_last if is_output else self.is_first
        return self.is_first or self.is_last


ALL_LAYERS = Stage(range(1 << 30), is_first=True, is_last=True)
"""Stage of a model that is not divided into stages."""


class StageExchange(Protocol):
    """Exchange of a stage with its neighbours. All stages make the same calls in the same order, one of each per
    step."""

    def receive(self, positions_T: Tensor, num_parts: int) -> list[Tensor]:
        """Return matrices of shape TD of the previous stage, for the rows of this step.

        Blocks until the previous stage has sent them.
        """

    def send(self, parts: Sequence[Tensor]) -> None:
        """Pass matrices of shape TD to the next stage.

        Blocks until there is room for them.
        """

    def all_succeeded(self, has_succeeded: bool) -> bool:
        """Return whether this stage and all earlier ones succeeded, and report it to the next stage.

        So the last stage, which answers the core, knows about all. All stages call it, between two steps.

        Blocks until the previous stage has reported.
        """


def layer_of(name: str) -> int | None:
    """Return the index of the layer that a tensor of a checkpoint belongs to; `None` if it lies before or after
    them."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def split_layers(layer_bytes: Sequence[int], output_bytes: int, num_stages: int) -> list[int]:
    """Return the number of layers of each stage: at least one, and weights of about the same size.

    Minimizes the sum of squares of the stages' weights: a step waits for the largest stage.

    Args:
        layer_bytes: bytes of each layer's weights.
        output_bytes: bytes of the output weight, which the last stage reads too. An embedding is only looked up.
        num_stages: number of stages, at most the number of layers.
    """
    sums = [0, *itertools.accumulate(layer_bytes)]
    # best[end]: the least sum of squares of the stages so far, and their boundaries.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(1, num_stages + 1):
        extra = output_bytes if stage == num_stages else 0
        ends = range(stage, len(layer_bytes) + 1) if stage < num_stages else [len(layer_bytes)]
        best = {
            end: min(
                (cost + (sums[end] - sums[start] + extra) ** 2, [*counts, end - start])
                for start, (cost, counts) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[len(layer_bytes)][1]


def stages_of(counts: Sequence[int]) -> list[Stage]:
    """Return the stages that have these numbers of layers."""
    ends = list(itertools.accumulate(counts))
    return [
        Stage(range(end - count, end), is_first=end == count, is_last=end == ends[-1])
        for count, end in zip(counts, ends, strict=True)
    ]
