"""Decode steps that repeat: the same requests, one token later. Their arrays are advanced in place.

perf: between two steps of one stream the kernel threads wait for Python: 0.8 ms of 6 ms before arrays were kept
(docs/performance.md).
"""

from collections.abc import Sequence

from octavo.protocol.steps import Scheduled, StepPlan
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.executor.runner import Samples


class RepeatedDecode:
    """The arrays of the last step, if the next one may be the same one token later.

    Args:
        plan: plan of the last step.
        inputs: arrays of the step.
        samples: samples of the step.
        batch: batch of the plan's requests.
    """

    def __init__(self, plan: StepPlan, inputs: StepInputs, samples: Samples, batch: BatchState) -> None:
        self.inputs, self.samples = inputs, samples
        self._batch = batch
        self._scheduled = plan.scheduled
        self._has_tokens = False
        """Whether `inputs.token_ids_T` holds the tokens of the next step."""

    @classmethod
    def of(cls, plan: StepPlan, inputs: StepInputs, samples: Samples, batch: BatchState) -> "RepeatedDecode | None":
        """Return the arrays of the last step; `None` if the next step cannot repeat it.

        It cannot if a request has more than one token, if the step uses more than tokens, keys and values, or if the
        sampling state of a request follows its tokens.
        """
        is_decode = len(samples) == len(plan.scheduled) == len(inputs.token_ids_T) and samples.draft_tokens is None
        others = (inputs.states, inputs.cross, inputs.given, inputs.axes_AT, inputs.pieces)
        if not is_decode or samples.has_traits or any(one is not None for one in others):
            return None
        return cls(plan, inputs, samples, batch)

    def try_advance(self, plan: StepPlan) -> bool:
        """Advance the arrays to the next tokens if `plan` changes nothing else; otherwise return False."""
        scheduled = [Scheduled(entry.slot, entry.start + 1, 1, 1) for entry in self._scheduled]
        if plan != StepPlan(plan.sequence, [], [], [], scheduled):
            return False
        # The first position of a block needs a block that the arrays lack.
        if any(entry.start % self._batch.block_size == 0 for entry in scheduled):
            return False
        self._scheduled = scheduled
        inputs = self.inputs
        inputs.positions_T += 1
        inputs.context_lens += 1
        for group in inputs.groups:
            group.slot_mapping_T += 1
        if not self._has_tokens:
            inputs.token_ids_T[:] = self._batch.tokens_at(inputs.slots_T, inputs.positions_T)
        self.samples.advance()
        return True

    def append(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens to the batch, where the next step reads them."""
        tokens_T = self.inputs.token_ids_T
        # A request without a token has failed, but its next step may already be planned.
        tokens_T[:] = [max(token_id, 0) for token_id in token_ids]
        self._batch.append_sampled(self.samples.slots_N, self.samples.positions_N, tokens_T)
        self._has_tokens = True
