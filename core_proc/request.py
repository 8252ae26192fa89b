"""One request in the core: its tokens, its progress, its place in the batch, its state.

Holds data and the state machine; what happens to a request is decided in `scheduler/`.
"""

from enum import Enum

from octavo.core_proc.gathered import Gathered
from octavo.protocol.errors import IllegalTransition
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import BlockId, RequestId, SlotId, TokenId
from octavo.protocol.requests import Submit

RequestKey = tuple[bytes, RequestId]
"""A frontend's identity and its name for the request: two frontends may choose the same name."""


class RequestState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """In the queue: not yet started, or preempted."""
    RUNNING = "running"
    """Holds a slot and blocks."""
    FINISHED = "finished"
    """Its `Finished` or `Failed` has been made."""


REQUEST_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    # Back to waiting is preemption by recompute.
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class Request:
    """One sequence being generated.

    Invariant: `token_ids` holds what is known; `num_tokens` counts also the tokens that steps in
    flight sample. Work is left while `num_computed_tokens < num_tokens`; there is no other notion of
    a prefill or a decode.
    """

    __slots__ = (
        "adapter",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "client",
        "gathered",
        "has_delivered_prompt_logprobs",
        "is_constrained",
        "is_resumed",
        "num_announced_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_named_blocks",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "slot",
        "state",
        "stream_interval",
        "time_first_token",
        "time_queued",
        "time_scheduled",
        "token_ids",
    )

    def __init__(self, client: bytes, submit: Submit, order: tuple[int, int], now: float) -> None:
        self.client = client
        self.request_id = submit.request_id
        self.sampling = submit.sampling
        self.cache_salt = submit.cache_salt
        self.adapter = submit.adapter
        self.is_constrained = submit.grammar is not None
        """Its tokens are drawn with masks, which come to the workers after the plan."""
        self.stream_interval = submit.stream_interval
        self.gathered = Gathered()
        """Empty but under a `stream_interval` above 1."""
        self.order = order
        """Place among all requests, unique; the least is served first and preempted last."""
        self.state = RequestState.WAITING
        self.token_ids: list[TokenId] = [*submit.prompt_token_ids, *submit.resume_output_token_ids]
        """Prompt and all outputs that are known."""
        self.num_prompt_tokens = len(submit.prompt_token_ids)
        self.num_computed_tokens = 0
        """Positions whose KV is computed or scheduled; workers execute plans in order, so it is the same."""
        self.num_pending_tokens = 0
        """Outputs that steps in flight sample: they count, but their ids are not known yet."""
        self.num_in_flight = 0
        """Steps in flight that compute a part of this request."""
        self.slot: SlotId | None = None
        self.block_ids: list[BlockId] = []
        self.num_announced_blocks = 0
        """Leading blocks that the workers have been told of."""
        self.num_named_blocks = 0
        """Leading blocks whose contents the prefix cache has been told."""
        self.block_hashes: list[bytes] = []
        """Of the full blocks of known tokens, as far as anybody has asked for them."""
        self.num_cached_tokens = 0
        """Prompt tokens taken from the prefix cache before the first preemption."""
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """Collected over the prompt's chunks; the first token has no logprob."""
        self.is_resumed = bool(submit.resume_output_token_ids)
        """An earlier core has delivered some of its outputs, and everything that comes with the first."""
        self.has_delivered_prompt_logprobs = self.is_resumed
        self.time_queued = now
        self.time_scheduled = 0.0
        self.time_first_token = 0.0

    @property
    def key(self) -> RequestKey:
        """Name of the request in this core."""
        return (self.client, self.request_id)

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs, those that are still being sampled included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_known_outputs(self) -> int:
        """Outputs whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next steps must compute: 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_first_run(self) -> bool:
        """True until a preemption or a resume: what is computed now has not been counted before."""
        return self.num_preemptions == 0 and not self.is_resumed

    def move(self, target: RequestState) -> None:
        """Change state.

        Raises:
            IllegalTransition: the table has no such move.
        """
        if target not in REQUEST_TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.request_id}: {self.state.value} to {target.value}")
        self.state = target
