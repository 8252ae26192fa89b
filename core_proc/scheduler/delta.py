"""A step under construction, and its results: the `StepPlan` for the workers and the `StepRecord` for `commit()`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from octavo.core_proc.request import Request
from octavo.protocol.adapters import AdapterLoad
from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import IdArray, SlotId, TokenId
from octavo.protocol.media import StepMedia, grids_of
from octavo.protocol.prompt_embeds import StepEmbeds, StepEmbedsBuilder
from octavo.protocol.steps import POOLED, Admitted, Appended, BlockCopy, Scheduled, StateMove, StepPlan, StepResult


@dataclass(slots=True)
class StepRecord:
    """A step in flight: what `commit()` needs."""

    sequence: int
    requests: list[Request]
    scheduled: list[Scheduled]
    """What the step computes for each request, in the order of `requests`."""
    sampling: list[Request]
    """The requests for which the step samples a token, in the same order."""
    unsampled: list[Request]
    """The requests for which no token is sampled: the step ends in the middle of their prompts."""
    awaits_input: bool
    """True until a step hook has sent the workers the input that sampling needs."""
    num_tokens: int
    """Number of tokens computed for all requests."""
    num_decode_tokens: int
    """Number of these tokens that are outputs, computed one per request and step, or drafts after outputs."""
    draft_tokens: list[tuple[SlotId, IdArray]] = field(default_factory=list)
    """Draft tokens that the step verifies, in the order of their requests."""
    num_steps: int = 1
    """See `StepPlan.num_steps`."""
    encodes: bool = False
    """Whether the step encodes media, which takes longer than its number of tokens suggests."""
    is_ahead: bool = False
    """Whether the step was planned while another one was in flight."""

    @property
    def chunks(self) -> Iterator[tuple[Request, Scheduled]]:
        """Pairs of a request and what the step computes for it."""
        return zip(self.requests, self.scheduled, strict=True)

    @property
    def num_step_tokens(self) -> int:
        """Number of tokens computed in each of its steps."""
        return self.num_tokens // self.num_steps

    @property
    def only_decodes(self) -> bool:
        """Whether every request gets one token from each step and no drafts are verified."""
        return self.num_decode_tokens == self.num_tokens and not self.draft_tokens

    def leave_out(self, num_steps: int) -> None:
        """Do not count the last steps of a plan of several steps: the workers have ended it before them."""
        num_tokens = num_steps * len(self.requests)
        self.num_tokens -= num_tokens
        self.num_decode_tokens -= num_tokens

    def sampled(self, result: StepResult) -> Iterator[tuple[Request, TokenId]]:
        """Yield the tokens of a result, each with its request."""
        requests: Iterable[Request] = self.sampling
        if result.counts:
            requests = chain.from_iterable(map(repeat, self.sampling, result.counts))
        return zip(requests, result.token_ids, strict=True)

    def check(self, result: StepResult) -> None:
        """Verify that a result can belong to this step.

        Raises:
            ProtocolError: the number of tokens, logprobs or pooled vectors does not match.
        """
        num_tokens, num_requests = len(result.token_ids), len(self.sampling)
        is_valid = len(result.logprobs) in (0, num_tokens) and result.token_ids.count(POOLED) == len(result.pooled)
        if result.counts:
            wanted = [scheduled.num_samples for scheduled in self.scheduled if scheduled.num_samples]
            is_valid &= len(wanted) == len(result.counts) and sum(result.counts) == num_tokens
            is_valid &= all(map(lambda count, most: 0 < count <= most, result.counts, wanted))
        else:
            is_valid &= num_tokens == num_requests
        if not is_valid:
            num_positions = sum(scheduled.num_samples for scheduled in self.scheduled)
            raise ProtocolError(
                f"step {self.sequence} samples {num_positions} positions of {num_requests} requests, its result has "
                f"{num_tokens} tokens, {len(result.counts)} counts, {len(result.logprobs)} logprobs and "
                f"{len(result.pooled)} vectors"
            )


class StepBuilder:
    """One step while `plan()` fills it."""

    def __init__(self) -> None:
        self.num_tokens_left = 0
        self.num_steps = 1
        """See `StepPlan.num_steps`."""
        self.decodes: list[Request] = []
        """Requests that are extended by one token per step."""
        self.scheduled: list[Scheduled] = []
        """What the step computes for the requests of `decodes`; `finish` adds the prefilling ones."""
        self.num_decode_tokens = 0
        """Tokens of decodes that compute an output. The other decodes compute the last token of a prompt."""
        self.draft_tokens: list[tuple[SlotId, IdArray]] = []
        """Drafts that follow the last tokens of requests, by slot, in the order of the requests."""
        self.num_draft_tokens = 0
        """Number of drafts after decodes."""
        self.num_drafts = 0
        """See `StepPlan.num_drafts`."""
        self.state_moves: list[StateMove] = []
        self.num_next_blocks = 0
        """Number of new blocks that the decodes need for the step after this one, over all groups."""
        self.admitted: list[Request] = []
        self.adapter_loads: list[AdapterLoad] = []
        self.copies_out: list[BlockCopy] = []
        self.copies_in: list[BlockCopy] = []
        self.state_copies_out: list[BlockCopy] = []
        self.state_copies_in: list[BlockCopy] = []
        self.media: StepMedia | None = None
        self.has_preempted = False
        self.num_spare_blocks = 0
        """Free blocks that no running request needs for its tokens; computed by admission."""
        self.may_await_input = True
        """False if no live request needs step input."""
        self._starts: dict[Request, int] = {}
        """First position that the step computes, for each prefilling request."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed so far."""
        return not self.decodes and not self._starts

    @property
    def prefills(self) -> list[Request]:
        """The requests in the step that prefill."""
        return list(self._starts)

    @property
    def requests(self) -> list[Request]:
        """All requests in the step."""
        return [*self.decodes, *self._starts]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes so far, for all requests."""
        prefilled = sum([request.num_computed_tokens - start for request, start in self._starts.items()])
        return sum([one.num_tokens for one in self.scheduled]) + prefilled

    def num_tokens_of(self, request: Request) -> int:
        """Return how many tokens of a prefilling request the step computes so far."""
        start = self._starts.get(request)
        return 0 if start is None else request.num_computed_tokens - start

    def compute(self, request: Request, num_tokens: int) -> None:
        """Add `num_tokens` tokens of a prefilling request to the step."""
        self._starts.setdefault(request, request.num_computed_tokens)
        request.num_computed_tokens += num_tokens
        self.num_tokens_left -= num_tokens

    def add_drafts(self, request: Request, place: int | None, token_ids: IdArray) -> None:
        """Verify drafts after all known tokens of a request; `place` is its index in `decodes`, or None if it
        prefills."""
        assert request.slot is not None
        num_draft_tokens = len(token_ids)
        if place is not None:
            one = self.scheduled[place]
            self.scheduled[place] = Scheduled(one.slot, one.start, 1 + num_draft_tokens, 1 + num_draft_tokens)
            self.num_draft_tokens += num_draft_tokens
        self.draft_tokens.append((request.slot, token_ids))
        self.num_tokens_left -= num_draft_tokens

    # long: a line for each field of the plan
    def finish(
        self,
        sequence: int,
        released: list[SlotId],
        grown: Sequence[Request],
        sampled: Sequence[tuple[Request, TokenId]] = (),
    ) -> tuple[StepPlan, StepRecord]:
        """Return the plan and its record, and count the step as in flight.

        Args:
            sequence: number of the step.
            released: slots released since the last plan.
            grown: requests that may have new blocks.
            sampled: tokens that not all workers know, with their requests.
        """
        scheduled = self.scheduled
        sampling, unsampled = self.decodes[:], list[Request]()
        num_tokens = len(self.decodes) * self.num_steps + self.num_draft_tokens
        num_decode_tokens = self.num_decode_tokens + self.num_draft_tokens
        # `RunningBatch.decode` has already counted decodes as in flight.
        for request, start in self._starts.items():
            num_computed = request.num_computed_tokens - start
            num_samples = 1 + request.num_uncertain_tokens if request.num_uncomputed_tokens == 0 else 0
            request.num_pending_tokens += num_samples > 0  # drafts are already counted as pending
            (sampling if num_samples else unsampled).append(request)
            request.num_in_flight += 1
            num_tokens += num_computed
            num_decode_tokens += num_computed == 1 and start >= request.num_prompt_tokens
            assert request.slot is not None
            scheduled.append(Scheduled(request.slot, start, num_computed, num_samples))
        requests = self.requests
        awaits_input = self.may_await_input and any(request.needs_step_input for request in sampling)
        plan = StepPlan(
            sequence=sequence,
            released=released,
            admitted=[_admitted(request) for request in self.admitted],
            appended=_appended(grown),
            scheduled=scheduled,
            awaits_masks=awaits_input,
            sampled=self._still_unknown(sampled) if sampled else [],
            adapter_loads=self.adapter_loads,
            draft_tokens=self.draft_tokens,
            # perf: if a step computes only outputs, its requests need not be searched.
            prompt_embeds=_step_embeds(requests, scheduled) if num_tokens > num_decode_tokens else None,
            copies_out=self.copies_out,
            copies_in=self.copies_in,
            num_drafts=self.num_drafts,
            state_moves=self.state_moves,
            media=self.media,
            state_copies_out=self.state_copies_out,
            state_copies_in=self.state_copies_in,
            num_steps=self.num_steps,
        )
        record = StepRecord(
            sequence=sequence,
            requests=requests,
            scheduled=scheduled,
            sampling=sampling,
            unsampled=unsampled,
            awaits_input=awaits_input,
            num_tokens=num_tokens,
            num_decode_tokens=num_decode_tokens,
            draft_tokens=self.draft_tokens,
            num_steps=self.num_steps,
            encodes=self.media is not None and bool(self.media.inputs),
        )
        return plan, record

    def _still_unknown(self, sampled: Sequence[tuple[Request, TokenId]]) -> list[tuple[SlotId, TokenId]]:
        """Return the tokens by slot, except for requests that have left or that are admitted now with all their
        tokens."""
        admitted = frozenset(self.admitted)
        return [
            (request.slot, token_id)
            for request, token_id in sampled
            if request.slot is not None and request not in admitted
        ]


def _admitted(request: Request) -> Admitted:
    """Return a request's entry into the batch."""
    assert request.slot is not None
    request.num_announced_blocks = request.num_blocks
    return Admitted(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=request.token_ids[:],
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=[block_ids[:] for block_ids in request.block_ids],
        params=request.params,
        adapter_slot=request.adapter_slot,
        embed_spans=request.prompt_embeds.spans if request.prompt_embeds is not None else [],
        grids=grids_of(request.media),
        both_ways_spans=[span for item in request.media if item.is_both_ways for span in item.spans],
    )


def _step_embeds(requests: Sequence[Request], scheduled: Sequence[Scheduled]) -> StepEmbeds | None:
    """Return the prompt embeddings within the positions that a step computes."""
    builder = StepEmbedsBuilder()
    for request, part in zip(requests, scheduled, strict=True):
        if request.prompt_embeds is not None:
            builder.add(part.slot, request.prompt_embeds, part.start, part.start + part.num_tokens)
    return builder.build()


def _appended(grown: Sequence[Request]) -> list[Appended]:
    appended = []
    for request in sorted(grown, key=lambda request: request.order):
        if (start := request.num_announced_blocks) < request.num_blocks:
            assert request.slot is not None
            appended.append(Appended(request.slot, [block_ids[start:] for block_ids in request.block_ids]))
            request.num_announced_blocks = request.num_blocks
    return appended
