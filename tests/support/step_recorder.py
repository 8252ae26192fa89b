"""Runs the plans of a core on an executor, and keeps them for the other workers of the engine."""

import msgspec
from worker_plans import NUM_BLOCKS, sampled_slots

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.steps import StepPlan, StepResult
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.models.base import Model


class StepRecorder:
    """Computes plans one by one."""

    def __init__(self, model: Model, config: ResolvedConfig, stream: Stream) -> None:
        self.model = model
        self.results: list[StepResult] = []
        self.plans: list[StepPlan] = []
        self._sampled: list[tuple[int, int]] = []
        sizes = {"num_blocks": NUM_BLOCKS, "max_model_len": config.max_model_len}
        self.executor = open_executor(model, config, stream, self.results.append, **sizes)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a plan and return the result, which is kept in the form that a core sends to workers."""
        self.plans.append(msgspec.structs.replace(plan, sampled=self._sampled))
        self.compute(plan)
        result = self.results[-1]
        self._sampled = list(zip(sampled_slots(plan, result), result.token_ids, strict=True))
        return result

    def compute(self, plan: StepPlan) -> None:
        """Wait for the result of a plan."""
        self.executor.begin(plan)
        self.executor.drain()


def without_time(results: list[StepResult]) -> list[StepResult]:
    """Return the results without their durations."""
    return [msgspec.structs.replace(result, elapsed_s=0.0, idle_s=0.0, drafts_s=0.0) for result in results]
