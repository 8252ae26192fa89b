"""Plans of several decode steps. The worker splits each into steps, and the executor computes them one by one."""

from collections.abc import Callable, Iterator

import msgspec

from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import NO_TOKEN, Scheduled, StepPlan, StepResult
from octavo.worker_proc.batch.state import BatchState


class MultiStep:
    """The steps of one plan, and their results.

    Args:
        plan: plan of several steps.
        batch: batch of the plan's requests.
        has_command: returns whether a command waits, which ends the plan; `None` if nothing interrupts plans.
    """

    def __init__(self, plan: StepPlan, batch: BatchState, has_command: Callable[[], bool] | None = None) -> None:
        self._plan = plan
        self._batch = batch
        self._has_command = has_command or (lambda: False)
        self._results: list[StepResult] = []
        self._running: set[int] = set(range(len(plan.scheduled)))
        """Indices of the requests that no token has ended yet."""

    def steps(self) -> Iterator[StepPlan]:
        """Iterate over one plan per step; the first one carries all changes.

        Ends when no request needs another step, or when a command waits.

        Call `add` with the result of each step before taking the next.
        """
        plan = self._plan
        for index in range(plan.num_steps):
            scheduled = [Scheduled(entry.slot, entry.start + index, 1, 1) for entry in plan.scheduled]
            if index == 0:
                yield msgspec.structs.replace(plan, scheduled=scheduled, num_steps=1)
            elif not self._running or self._has_command():
                return
            else:
                yield StepPlan(plan.sequence, [], [], [], scheduled)

    def add(self, result: StepResult) -> None:
        """Record the result of a step."""
        self._results.append(result)
        for place in list(self._running):
            entry, token_id = self._plan.scheduled[place], result.token_ids[place]
            row = self._batch.rows[entry.slot]
            num_outputs = entry.start + len(self._results) + 1 - row.num_prompt_tokens
            if token_id == NO_TOKEN or is_stop_token(row.sampling.spec, token_id, num_outputs):
                self._running.discard(place)

    def result(self) -> StepResult:
        """Return the result of the plan: all tokens of the first request, then those of the second, and so on."""
        results, places = self._results, range(len(self._plan.scheduled))
        logprobs: list[TokenLogprobs | None] = []
        if any(one.logprobs for one in results):
            logprobs = [one.logprobs[place] if one.logprobs else None for place in places for one in results]
        return msgspec.structs.replace(
            results[0],
            token_ids=pack_ids([one.token_ids[place] for place in places for one in results]),
            logprobs=logprobs,
            counts=[len(results)] * len(places),
            elapsed_s=sum(one.elapsed_s for one in results) + sum(one.idle_s for one in results[1:]),
        )


def is_stop_token(spec: SamplingSpec, token_id: int, num_outputs: int) -> bool:
    """Return whether a token ends a request that has `num_outputs` outputs, this token included.

    Only stop tokens are checked, as in the core's `find_stop`. Other stops, such as a repetition or an abort, waste the
    remaining steps: the core drops their tokens.
    """
    return num_outputs > spec.min_tokens and (token_id in spec.eos_token_ids or token_id in spec.stop_token_ids)
