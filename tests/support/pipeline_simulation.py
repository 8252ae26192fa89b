"""A pipeline on a virtual clock: the real scheduler, and stages with a known time for each step."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from core_fakes import CLIENT, cache_plan, core_config
from simulation.worker import SimulatedWorker

from octavo.core_proc import invariants
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.events import Finished
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan

StageTime = Callable[[int], float]
"""Seconds that a stage takes for a step of this many tokens."""

NUM_AREAS = 2
"""Number of steps that a stage may be ahead of the next one."""


@dataclass(frozen=True)
class Load:
    """Callers that each send one request after another."""

    num_callers: int
    num_requests: int
    prompt_tokens: tuple[int, int]
    """Minimum and maximum number of prompt tokens."""
    output_tokens: tuple[int, int]
    seed: int = 0


@dataclass
class Usage:
    """Utilization of the stages while every caller had a request."""

    seconds: float = 0.0
    busy_s: float = 0.0
    """Busy seconds of all stages together."""
    num_stages: int = 1
    num_steps: int = 0

    @property
    def bubble(self) -> float:
        """Fraction of the stages' time in which they wait."""
        return 1.0 - self.busy_s / (self.num_stages * self.seconds)


class PipelineSimulation:
    """One engine with stages.

    Args:
        num_stages: number of stages of the model.
        stage_s: the time of a step on each stage.
        core_s: from the end of a step on the last stage to the next plan on the first.
        checks: whether invariants are checked after each call.
        changes: changes of the configuration.
    """

    def __init__(
        self, num_stages: int, stage_s: StageTime, *, core_s: float = 0.0005, checks: bool = False, **changes
    ) -> None:
        self.config = core_config(pipeline_parallel_size=num_stages, world_size=num_stages, **changes)
        num_blocks = changes.get("max_num_seqs", 64) * (self.config.max_model_len // self.config.block_size + 2)
        self.now_s = 0.0
        self.scheduler = Scheduler(self.config, cache_plan(self.config, num_blocks), lambda: 1.0 + self.now_s)
        self.worker = SimulatedWorker(self.config, num_blocks)
        self._stage_s, self._core_s, self._checks = stage_s, core_s, checks
        self._begins_s = [deque([0.0] * NUM_AREAS, maxlen=NUM_AREAS) for _ in range(num_stages)]
        """Start times of each stage's latest steps."""
        self._ends_s = [0.0] * num_stages
        """Time at which each stage can start another step."""
        self.busy: list[tuple[float, float]] = []
        """Start and end time of every step on every stage."""

    def run(self, load: Load) -> Usage:
        """Serve the load until the last request is sent, and return how busy the stages were until then."""
        rng = random.Random(load.seed)
        in_flight: deque[tuple[float, object]] = deque()
        num_sent = num_ended = num_steps = 0

        def send() -> None:
            nonlocal num_sent
            prompt = [rng.randrange(1, 50) for _ in range(rng.randint(*load.prompt_tokens))]
            spec = SamplingSpec(max_tokens=rng.randint(*load.output_tokens), seed=num_sent)
            assert not self.scheduler.submit(CLIENT, Submit(f"r{num_sent}", prompt, spec))
            num_sent += 1

        for _ in range(load.num_callers):
            send()
        depth = self.config.pipeline_parallel_size + 1
        until_s = 0.0
        while num_ended < load.num_requests:
            while self.scheduler.may_plan(depth) and (plan := self.scheduler.plan()) is not None:
                if self._checks:
                    invariants.check_plan(self.scheduler, plan)
                in_flight.append((self._compute(plan), self.worker.execute(plan)))
                num_steps += 1
            end_s, result = in_flight.popleft()
            self.now_s = max(self.now_s, end_s) + self._core_s
            for _, event in self.scheduler.commit(result):
                if isinstance(event, Finished):
                    num_ended += 1
                    if num_sent < load.num_requests:
                        send()
                        until_s = self.now_s
            if self._checks:
                invariants.check(self.scheduler)
        busy_s = sum(max(0.0, min(end, until_s) - begin) for begin, end in self.busy)
        return Usage(until_s, busy_s, len(self._ends_s), num_steps)

    def _compute(self, plan: StepPlan) -> float:
        """Return when the last stage ends a step."""
        duration_s = self._stage_s(sum(part.num_tokens for part in plan.scheduled))
        ready_s = self.now_s
        for stage, begins_s in enumerate(self._begins_s):
            begin_s = max(ready_s, self._ends_s[stage])
            self.busy.append((begin_s, begin_s + duration_s))
            begins_s.append(begin_s)
            ready_s = begin_s + duration_s
            if stage + 1 < len(self._begins_s):  # the next stage has consumed the rows of the step that used this area
                ready_s = max(ready_s, self._begins_s[stage + 1][0])
            self._ends_s[stage] = ready_s
        return ready_s
