"""Measurement of step memory, for all runners: plans of equal requests, and the form of the result."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import PoolingSpec, RequestParams
from octavo.protocol.steps import Admitted, Scheduled, StepPlan

POOLED_WHOLE: RequestParams = PoolingSpec("token_embed", "all", skip_reading_prefix_cache=True)
"""The request that takes the most memory in a model that pools."""

MAX_SAMPLES_AFTER_DRAFTS = 512
"""Row limit of logits after drafts: 512 rows of 152,000 tokens take 0.3 GB. Larger steps draw in rounds."""


def max_samples(config: ResolvedConfig) -> int:
    """Return the most tokens sampled at once: several for each request that has drafts."""
    depth = config.speculation.max_depth if config.speculation else 0
    most = min(MAX_SAMPLES_AFTER_DRAFTS, config.max_num_batched_tokens)
    return min(config.max_num_seqs * (1 + depth), max(config.max_num_seqs, most))


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of steps, in addition to weights and cache."""

    activation_bytes: int
    graph_bytes: int = 0


def prompts_plan(
    lengths: Sequence[int],
    params: RequestParams,
    blocks_each: int,
    *,
    sequence: int = 0,
    released: Iterable[int] = (),
    num_groups: int = 1,
    has_states: bool = False,
    samples: bool = True,
    num_draft_tokens: int = 0,
) -> StepPlan:
    """Return the plan of a step that computes complete prompts, one per slot from 0.

    Args:
        lengths: lengths of the prompts, in tokens.
        params: parameters of each request.
        blocks_each: number of blocks of each request, which are not shared.
        sequence: sequence number of the plan.
        released: slots that an earlier plan filled.
        num_groups: number of KV cache groups. A request has the same blocks in each, which does not matter where only
            memory is measured.
        has_states: whether requests have a state. All share one, for the same reason.
        samples: whether a token is sampled after each prompt.
        num_draft_tokens: number of drafts after each prompt. If there are any, prompts must have one token.
    """
    states = [[0] * blocks_each] * has_states
    admitted = [
        Admitted(
            slot=slot,
            request_id="",
            token_ids=pack_ids([0] * length),
            num_prompt_tokens=length,
            block_ids=[list(range(slot * blocks_each, (slot + 1) * blocks_each))] * num_groups + states,
            params=params,
        )
        for slot, length in enumerate(lengths)
    ]
    scheduled = [
        Scheduled(slot, 0, length + num_draft_tokens, int(samples) + num_draft_tokens)
        for slot, length in enumerate(lengths)
    ]
    draft_tokens = [(slot, pack_ids([0] * num_draft_tokens)) for slot in range(len(lengths) if num_draft_tokens else 0)]
    return StepPlan(sequence, list(released), admitted, [], scheduled, draft_tokens=draft_tokens)
