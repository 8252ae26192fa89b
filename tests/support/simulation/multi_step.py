"""Plans of several decode steps in the simulation: taken apart as workers do it."""

from collections.abc import Callable

from msgspec.structs import replace

from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Scheduled, StepPlan, StepResult


def execute_steps(
    plan: StepPlan,
    execute: Callable[[StepPlan], StepResult],
    ends: Callable[[int, int, int], bool],
    max_steps: int,
) -> StepResult:
    """Return the result of a plan of several steps.

    Args:
        plan: plan of decodes alone.
        execute: returns the result of one step.
        ends: whether a token at a position ends the request of a slot: (slot, token, position).
        max_steps: number of steps after which another command interrupts the plan.
    """
    results: list[StepResult] = []
    running = {part.slot for part in plan.scheduled}
    for index in range(plan.num_steps):
        parts = [Scheduled(part.slot, part.start + index, 1, 1) for part in plan.scheduled]
        step = StepPlan(plan.sequence, [], [], [], parts)
        results.append(execute(step if index else replace(plan, scheduled=parts, num_steps=1)))
        for part, token_id in zip(parts, results[-1].token_ids, strict=True):
            if ends(part.slot, token_id, part.start + 1):
                running.discard(part.slot)
        if not running or index + 1 == max_steps:
            break
    places = range(len(plan.scheduled))
    logprobs: list[TokenLogprobs | None] = []
    if any(result.logprobs for result in results):
        logprobs = [result.logprobs[place] if result.logprobs else None for place in places for result in results]
    return replace(
        results[0],
        token_ids=pack_ids([result.token_ids[place] for place in places for result in results]),
        logprobs=logprobs,
        counts=[len(results)] * len(places),
    )


def is_plain(plan: StepPlan) -> bool:
    """Whether a plan may have several steps: each part computes and samples as many tokens as there are steps.

    The first step may have a row of a prompt, if nothing else of the prompt is left to compute.
    """
    others = (plan.awaits_masks, plan.draft_tokens, plan.num_drafts, plan.state_moves, plan.media)
    sizes = {size for part in plan.scheduled for size in (part.num_tokens, part.num_samples)}
    return not any(others) and sizes == {plan.num_steps}


def is_last(sampling: SamplingSpec, token_id: int, num_outputs: int) -> bool:
    """Whether a token ends a request that has so many outputs with it."""
    return num_outputs > sampling.min_tokens and token_id in (*sampling.eos_token_ids, *sampling.stop_token_ids)
