"""One request in the core: its tokens, progress, place in the batch and state machine.

Decisions about requests are made in `scheduler/`.
"""

import functools
from enum import Enum
from typing import Any

from octavo.core_proc.pending_output import PendingOutput
from octavo.core_proc.request_map import RequestKey
from octavo.protocol.adapters import NO_ADAPTER
from octavo.protocol.errors import IllegalTransition
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import BlockId, IdArray, SlotId, TokenId, pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.prefix_hash import extra_keys_of
from octavo.protocol.requests import Submit
from octavo.protocol.steps import NO_TOKEN, POOLED


class RequestState(Enum):
    """The state of a request."""

    WAITING = "waiting"
    """In the queue: not yet started, or preempted."""
    SWAPPED = "swapped"
    """Waits for contents of blocks that are copied to the device, and holds nothing itself."""
    RUNNING = "running"
    """Holds a slot and blocks."""
    FINISHED = "finished"
    """Its `Finished` or `Failed` event has been created."""


REQUEST_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.SWAPPED, RequestState.FINISHED}),
    RequestState.SWAPPED: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    # Back to waiting is preemption by recompute.
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


_MAX_SHARED_STOP_TOKENS = 64


def stop_tokens_of(sampling: SamplingSpec) -> frozenset[TokenId]:
    """Return the tokens that may end a request, and those that stand for something else."""
    if len(sampling.eos_token_ids) + len(sampling.stop_token_ids) <= _MAX_SHARED_STOP_TOKENS:
        return _shared_stop_tokens(tuple(sampling.eos_token_ids), tuple(sampling.stop_token_ids))
    return frozenset((NO_TOKEN, POOLED, *sampling.eos_token_ids, *sampling.stop_token_ids))


@functools.lru_cache(maxsize=256)
def _shared_stop_tokens(eos: tuple[TokenId, ...], stop: tuple[TokenId, ...]) -> frozenset[TokenId]:
    """Most requests have the same: one set for all of them."""
    return frozenset((NO_TOKEN, POOLED, *eos, *stop))


_ONE_RESULT = SamplingSpec(max_tokens=1, seed=0)
"""Of a request that generates nothing: its result takes the place of the first token."""

NO_LIST: Any = ()
"""perf: stands for an empty list in the many requests that wait; it cannot be changed."""


class Request:
    """One sequence being generated, or pooled: then its result is sampled like a token, and ends it.

    Invariant: `token_ids` holds the known tokens; `num_tokens` also counts those that steps in flight sample. Work is
    left while `num_computed_tokens < num_tokens`. There is no other notion of prefill and decode.
    """

    __slots__ = (
        "adapter",
        "adapter_slot",
        "awaits_token",
        "block_hashes",
        "block_ids",
        "client",
        "extra_keys",
        "first_blocks",
        "first_decode",
        "has_delivered_prompt_logprobs",
        "is_decoding",
        "is_mixed",
        "is_resumed",
        "kv_transfer",
        "max_num_tokens",
        "media",
        "needs_step_input",
        "next_commit_check",
        "next_plan_check",
        "num_announced_blocks",
        "num_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_in_flight",
        "num_lost_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_uncertain_tokens",
        "order",
        "params",
        "pending_output",
        "prompt_embeds",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "slot",
        "state",
        "stop_tokens",
        "stream_interval",
        "time_first_token",
        "time_queued",
        "time_scheduled",
        "token_ids",
        "weight_version",
    )

    # long: one attribute after another
    def __init__(self, client: bytes, submit: Submit, order: int, now: float) -> None:
        self.client = client
        self.request_id = submit.request_id
        self.params = submit.params
        """What it computes."""
        self.sampling = submit.params if isinstance(submit.params, SamplingSpec) else _ONE_RESULT
        self.first_decode = 0
        """The position from which on its tokens need nothing of the encoder: see `EncoderSchedule.start`."""
        self.extra_keys = extra_keys_of(submit)
        """What its KV depends on besides token ids."""
        self.adapter = submit.adapter
        self.adapter_slot = NO_ADAPTER
        """While it runs: where the workers have its adapter."""
        self.kv_transfer = submit.kv_transfer
        """What it leaves for another engine; when it has finished: how to take it. None: nothing."""
        self.prompt_embeds = submit.prompt_embeds
        """Prompt embeddings; None: it has none."""
        self.media = submit.media
        """Its images and other media."""
        self.needs_step_input = submit.grammar is not None
        """A step hook sends the workers something for each of its samples, after the plan."""
        self.stream_interval = submit.stream_interval
        self.pending_output: PendingOutput | None = None
        """Tokens that its frontend does not know yet, under a `stream_interval` above 1."""
        self.order = order
        """Its unique position among all requests: the lowest is served first and preempted last."""
        self.state = RequestState.WAITING
        self.token_ids: IdArray = pack_ids(submit.prompt_token_ids)
        """Prompt and all outputs that are known."""
        self.token_ids.extend(submit.resume_output_token_ids)
        self.num_prompt_tokens = len(submit.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        """The length at which it ends at the latest. The scheduler lowers it to the model's limit."""
        self.stop_tokens = stop_tokens_of(self.sampling)
        """Tokens after which `find_stop` must be called."""
        self.num_computed_tokens = 0
        """Positions whose KV is computed or scheduled. Workers execute plans in order, so there is no difference."""
        self.num_pending_tokens = 0
        """Outputs that steps in flight sample: their ids are not known yet."""
        self.num_uncertain_tokens = 0
        """Those among them that may not come: drafts that a step in flight verifies, or the tokens of all but the first
        step of a plan. The positions before them are among the computed ones, and are taken back if they do not."""
        self.awaits_token = False
        """Whether it may be extended only when its last token is known, because some of them may not come."""
        self.num_in_flight = 0
        """Steps in flight that include this request."""
        self.is_decoding = False
        """Whether it is among `RunningBatch.decoding`."""
        self.next_plan_check = 0
        """perf: `RunningBatch` checks the request when this many tokens are computed."""
        self.next_commit_check: float = 0
        """perf: below this number of known tokens, the next token is only appended and sent."""
        self.slot: SlotId | None = None
        self.block_ids: list[list[BlockId]] = NO_LIST
        """Of each cache group, `num_blocks` long; `NULL_BLOCK` stands for a block that its window has passed."""
        self.first_blocks: list[int] = NO_LIST
        """Of each cache group, the index of the first block that the request holds; () if there are no windows."""
        self.num_blocks = self.num_announced_blocks = 0
        """Blocks of each cache group, and those among them that were sent to the workers: the first ones."""
        self.num_hashed_blocks = 0
        """Leading blocks whose hashes are in the prefix cache."""
        self.block_hashes: list[bytes] = NO_LIST
        """Hashes of full blocks of known tokens, computed on demand."""
        self.num_cached_tokens = 0
        """Prompt tokens taken from the prefix cache before the first preemption."""
        self.weight_version = 0
        """Of the weights that draw its tokens; set when it runs."""
        self.is_mixed = False
        """Its keys and values were computed with the weights of several versions: nothing of them is shared."""
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        """Positions whose KV was computed before the latest preemption. The prefix cache may still have some of it."""
        self.prompt_logprobs: list[TokenLogprobs | None]
        """Collected over the prompt's chunks, from its start on; the first token has no logprob."""
        self.is_resumed = bool(submit.resume_output_token_ids)
        """An earlier core has delivered some of its outputs, and everything that is sent with the first one."""
        self.has_delivered_prompt_logprobs = self.is_resumed
        self.time_queued = now
        self.time_scheduled = self.time_first_token = 0.0

    @property
    def key(self) -> RequestKey:
        """Name of the request in this core."""
        return (self.client, self.request_id)

    @property
    def max_tokens(self) -> int:
        """Most outputs that the caller wants."""
        return self.sampling.max_tokens

    @property
    def is_pooled(self) -> bool:
        """Whether its prompt may be as long as the model allows: no token follows."""
        return self.sampling is _ONE_RESULT

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs, including those that are still being sampled."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_known_outputs(self) -> int:
        """Outputs whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens left to compute: 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def lacks_a_decode(self) -> bool:
        """Whether one token is left to compute, which needs nothing of the encoder of media."""
        return self.num_tokens - self.num_computed_tokens == 1 and self.num_computed_tokens >= self.first_decode

    @property
    def reads_prefix_cache(self) -> bool:
        """False if all of its tokens must be computed."""
        return not self.params.skip_reading_prefix_cache

    @property
    def is_first_run(self) -> bool:
        """True until a preemption or a resume. Tokens computed later have been counted before."""
        return self.num_preemptions == 0 and not self.is_resumed

    def move(self, target: RequestState) -> None:
        """Change state.

        Raises:
            IllegalTransition: the table has no such move.
        """
        if target not in REQUEST_TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.request_id}: {self.state.value} to {target.value}")
        self.state = target
