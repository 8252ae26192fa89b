"""Builds the `StepResult` of a finished step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kernels.logprobs import RowLogprobs
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import IdArray, SlotId, pack_ids
from octavo.protocol.steps import NO_TOKEN, StepResult
from octavo.worker_proc.executor.in_flight import InFlightStep
from octavo.worker_proc.executor.runner import Accepted
from octavo.worker_proc.pooling.pooler import PendingPooled


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a step; see `StepResult`."""

    elapsed_s: float
    drafts_s: float = 0.0
    idle_s: float = 0.0


class StepClock:
    """Times the steps of one executor. A step begun before the previous one ended lasts from that end."""

    def __init__(self) -> None:
        self._last_end_s = 0.0

    def end_step(
        self,
        started_s: float,
        sampled_s: float,
        earlier_drafts_s: float = 0.0,
        *,
        has_drafts: bool = False,
        is_drafting: bool = False,
    ) -> StepTimes:
        """Return the times of a step that ends now.

        Args:
            started_s: when the step was begun.
            sampled_s: when its tokens were known.
            earlier_drafts_s: seconds that the device spent on drafts since the end of the previous step.
            has_drafts: whether drafts follow the step.
            is_drafting: whether the device is still making these drafts. They then count as part of the next step.
        """
        end_s = sampled_s if is_drafting else time.perf_counter()
        busy_until_s = self._last_end_s + earlier_drafts_s
        times = StepTimes(
            elapsed_s=end_s - max(started_s, busy_until_s) + earlier_drafts_s,
            drafts_s=earlier_drafts_s + (end_s - sampled_s if has_drafts else 0.0),
            idle_s=max(0.0, started_s - busy_until_s) if self._last_end_s else -1.0,
        )
        self._last_end_s = end_s
        return times


def step_result(
    step: InFlightStep,
    token_ids: list[int],
    times: StepTimes,
    accepted: Accepted | None = None,
    drafts: Sequence[tuple[SlotId, IdArray]] = (),
    earlier_drafts: Sequence[tuple[SlotId, IdArray]] = (),
) -> StepResult:
    """Return the result of a plan.

    Args:
        step: the finished step.
        token_ids: sampled tokens.
        times: times of the step.
        accepted: the samples that follow no wrong draft; `None` means all.
        drafts: draft tokens that may follow.
        earlier_drafts: drafts of the previous step, if their ids were unknown when it ended.
    """
    logprobs = _sampled_logprobs(step, token_ids)
    if accepted is not None:
        places = accepted.places.tolist()
        token_ids, logprobs = [token_ids[place] for place in places], [logprobs[place] for place in places if logprobs]
    return StepResult(
        sequence=step.sequence,
        token_ids=pack_ids(token_ids),
        logprobs=logprobs,
        prompt_logprobs=[
            (chunk.slot, list(map(_token_logprobs, chunk.token_ids, chunk.logprobs.rows()))) for chunk in step.prompts
        ],
        elapsed_s=times.elapsed_s,
        counts=[] if accepted is None else accepted.counts,
        faults=list(step.faults),
        adapter_faults=list(step.adapter_faults),
        pooled=step.output.outputs if isinstance(step.output, PendingPooled) else list(step.pooled),
        drafts=list(drafts),
        drafts_s=times.drafts_s,
        idle_s=times.idle_s,
        earlier_drafts=list(earlier_drafts),
    )


def _sampled_logprobs(step: InFlightStep, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
    """Return one entry per sampled token, `None` where no token was sampled. [] if there are no logprobs."""
    rows = None if step.output is None else step.output.logprobs()
    if rows is None:
        return []
    entries = [
        None if row is None or token_id == NO_TOKEN else _token_logprobs(token_id, row)
        for token_id, row in zip(token_ids, rows, strict=True)
    ]
    return entries if any(entry is not None for entry in entries) else []


def _token_logprobs(token_id: int, row: RowLogprobs) -> TokenLogprobs:
    """Return the message form of one position's logprobs: the token first, then the most likely tokens."""
    return TokenLogprobs(
        token_ids=[token_id, *row.top_token_ids],
        logprobs=[row.token_logprob, *row.top_logprobs],
        rank=row.rank,
    )
