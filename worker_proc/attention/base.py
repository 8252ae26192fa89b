"""What a model sees of attention: a planned step that is run once per layer."""

from typing import Protocol

from torch import Tensor

from octavo.worker_proc.batch.inputs import StepInputs


class Attention(Protocol):
    """Attention over the past of every request of the step."""

    def plan(self, inputs: StepInputs) -> None:
        """Prepare the next step. Call once, before the layers."""

    def run(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer_index: int) -> Tensor:
        """Store the step's keys and values of a layer, then attend; returns out_TNH."""
