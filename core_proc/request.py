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
    """Waits while its blocks are copied to the device. Holds no slot and no blocks."""
    RUNNING = "running"
    """Holds a slot and blocks."""
    FINISHED = "finished"
    """Its `Finished` or `Failed` event has been created."""


REQUEST_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.SWAPPED, RequestState.FINISHED}),
    RequestState.SWAPPED: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    # RUNNING -> WAITING is preemption by recompute.
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


_MAX_SHARED_STOP_TOKENS = 64


def stop_tokens_of(sampling: SamplingSpec) -> frozenset[TokenId]:
    """Return the tokens that may end a request, and the special ids that are not tokens."""
    if len(sampling.eos_token_ids) + len(sampling.stop_token_ids) <= _MAX_SHARED_STOP_TOKENS:
        return _shared_stop_tokens(tuple(sampling.eos_token_ids), tuple(sampling.stop_token_ids))
    return frozenset((NO_TOKEN, POOLED, *sampling.eos_token_ids, *sampling.stop_token_ids))


@functools.lru_cache(maxsize=256)
def _shared_stop_tokens(eos: tuple[TokenId, ...], stop: tuple[TokenId, ...]) -> frozenset[TokenId]:
    """Return one shared set for all requests with these ids: most requests have the same ones."""
    return frozenset((NO_TOKEN, POOLED, *eos, *stop))


_ONE_RESULT = SamplingSpec(max_tokens=1, seed=0)
"""Sampling parameters of a request without output tokens. Its result takes the place of the first token."""

NO_LIST: Any = ()
"""perf: an immutable stand-in for an empty list, because many requests wait."""


class Request:
    """One sequence that is generated or pooled. A pooled result is sampled like a token and ends the request.

    Invariant: `token_ids` holds the known tokens; `num_tokens` also counts tokens that steps in flight sample. Work is
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
        """Sampling, pooling or alignment parameters."""
        self.sampling = submit.params if isinstance(submit.params, SamplingSpec) else _ONE_RESULT
        self.first_decode = 0
        """First position that needs nothing from the encoder; see `EncoderSchedule.start`."""
        self.extra_keys = extra_keys_of(submit)
        """What its KV depends on besides token ids."""
        self.adapter = submit.adapter
        self.adapter_slot = NO_ADAPTER
        """Worker slot of its adapter, while it runs."""
        self.kv_transfer = submit.kv_transfer
        """What the request leaves for another engine, or how to fetch it once the request has finished. None if
        nothing."""
        self.prompt_embeds = submit.prompt_embeds
        """Prompt embeddings. None if it has none."""
        self.media = submit.media
        """Its images and other media."""
        self.needs_step_input = submit.grammar is not None
        """Whether a step hook sends the workers input for each of its samples, after the plan."""
        self.stream_interval = submit.stream_interval
        self.pending_output: PendingOutput | None = None
        """Tokens not yet sent to the frontend, if `stream_interval` is above 1."""
        self.order = order
        """Unique position among all requests: the lowest is served first and preempted last."""
        self.state = RequestState.WAITING
        self.token_ids: IdArray = pack_ids(submit.prompt_token_ids)
        """Prompt and all known outputs."""
        self.token_ids.extend(submit.resume_output_token_ids)
        self.num_prompt_tokens = len(submit.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        """Length at which the request ends at the latest. The scheduler lowers it to the model's limit."""
        self.stop_tokens = stop_tokens_of(self.sampling)
        """Tokens after which `find_stop` must be called."""
        self.num_computed_tokens = 0
        """Positions whose KV is computed or scheduled. Workers execute plans in order, so the difference does not
        matter."""
        self.num_pending_tokens = 0
        """Outputs that steps in flight sample. Their ids are not known yet."""
        self.num_uncertain_tokens = 0
        """Pending tokens that may not materialize: drafts under verification, or the tokens of all but the first step
        of a plan. The positions before them count as computed, which is undone if they do not materialize."""
        self.awaits_token = False
        """Whether the request may be extended only when its last token is known, because some tokens may not
        materialize."""
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
        """Blocks of each cache group, `num_blocks` per group. `NULL_BLOCK` replaces a block outside the group's
        window."""
        self.first_blocks: list[int] = NO_LIST
        """Index of the first block held in each cache group. Empty if there are no windows."""
        self.num_blocks = self.num_announced_blocks = 0
        """Blocks per cache group, and how many leading ones of these were sent to the workers."""
        self.num_hashed_blocks = 0
        """Leading blocks whose hashes are in the prefix cache."""
        self.block_hashes: list[bytes] = NO_LIST
        """Hashes of full blocks of known tokens, computed on demand."""
        self.num_cached_tokens = 0
        """Prompt tokens taken from the prefix cache before the first preemption."""
        self.weight_version = 0
        """Version of the weights that sample its tokens; set when it starts."""
        self.is_mixed = False
        """True if its KV was computed with several versions of the weights. It is not shared then."""
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        """Positions whose KV was computed before the latest preemption. The prefix cache may still have some of it."""
        self.prompt_logprobs: list[TokenLogprobs | None]
        """Logprobs of the prompt, collected over its chunks. The first token has none."""
        self.is_resumed = bool(submit.resume_output_token_ids)
        """True if an earlier core has sent some of its outputs, and everything that is sent with the first one."""
        self.has_delivered_prompt_logprobs = self.is_resumed
        self.time_queued = now
        self.time_scheduled = self.time_first_token = 0.0

    @property
    def key(self) -> RequestKey:
        """Key of the request in this core."""
        return (self.client, self.request_id)

    @property
    def max_tokens(self) -> int:
        """Most outputs that the caller wants."""
        return self.sampling.max_tokens

    @property
    def is_pooled(self) -> bool:
        """Whether the request has no output tokens. Its prompt may be as long as the model allows."""
        return self.sampling is _ONE_RESULT

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs, including pending outputs."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_known_outputs(self) -> int:
        """Number of outputs whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens left to compute: 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_ready_to_decode(self) -> bool:
        """Whether exactly one token is left to compute and it needs nothing from the encoder."""
        return self.num_tokens - self.num_computed_tokens == 1 and self.num_computed_tokens >= self.first_decode

    @property
    def reads_prefix_cache(self) -> bool:
        """False if all its tokens must be computed."""
        return not self.params.skip_reading_prefix_cache

    @property
    def is_first_run(self) -> bool:
        """True until a preemption or a resume. Tokens that are computed after that were already counted."""
        return self.num_preemptions == 0 and not self.is_resumed

    def move(self, target: RequestState) -> None:
        """Change the state.

        Raises:
            IllegalTransition: the state machine does not allow this transition.
        """
        if target not in REQUEST_TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.request_id}: {self.state.value} to {target.value}")
        self.state = target
