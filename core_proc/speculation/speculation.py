"""`Speculation`: which requests the next step drafts for, and what; learns from every result.

Part of the scheduler, not of the workers: drafts depend on known tokens and on the times of steps, which a recording
holds, so a replay makes the same ones.
"""

from collections.abc import Iterable, Sequence

from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.scheduler.batch import RunningBatch
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.core_proc.speculation.depth import (
    MAX_RESTS,
    PROBE_STEPS,
    REQUESTS_PER_REST,
    Depth,
    DraftCost,
    FixedDepth,
    NotAheadCost,
    StepCost,
)
from octavo.core_proc.speculation.drafts import DraftProposer
from octavo.core_proc.speculation.ngram import NgramProposer
from octavo.core_proc.speculation.payoff import Payoff
from octavo.core_proc.speculation.proposer import NoProposer, Proposer
from octavo.core_proc.speculation.suffix import SuffixProposer
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.ids import IdArray, SlotId, pack_ids
from octavo.protocol.stats import EngineStats
from octavo.protocol.steps import UNREAD_DRAFT, StepResult


class Speculation:
    """The drafts of one scheduler.

    Only a request whose last token is known is given drafts. Meanwhile the others are planned ahead, so a request that
    has a draft is first held until the steps in flight have sampled its tokens.

    Args:
        config: method and limits.
        batch: the running requests; holds those that wait for a token.
        counters: of drafts and accepted tokens; updated.
    """

    def __init__(self, config: ResolvedSpeculation, batch: RunningBatch, counters: EngineStats) -> None:
        self._config = config
        self._batch = batch
        self._counters = counters
        self._proposer = make_proposer(config)
        self._drafts = self._proposer if isinstance(self._proposer, DraftProposer) else None
        """Drafts that come from the workers; None: they make none."""
        self._depth = Depth if config.is_adaptive else FixedDepth
        self._default_depth = self._depth(config.max_depth)
        self._cost, self._draft_cost, self._not_ahead_cost = StepCost(), DraftCost(), NotAheadCost()
        self._payoff = Payoff()
        self._num_undrafted = 0
        """Steps since the workers have drafted."""
        self._depths: dict[Request, Depth] = {}
        self._drafted: dict[SlotId, Request] = {}
        """Whom the workers have drafted for after the latest step, by the slots that they had in it."""
        self._draft_tokens: dict[Request, IdArray] = {}
        """For requests of which the next step may compute more than one token."""
        self._candidates: dict[Request, IdArray] = {}
        """Of requests with a grammar: proposals that nobody has looked at with the grammar yet."""
        self._proposals: list[tuple[Request, IdArray]] = []
        """Of the other requests, meanwhile."""
        self._num_rests = 0
        """Steps that are left out before grammars are asked again."""
        self._rest_steps = 0
        """Steps that were left out after grammars were last asked; 0: what they drafted was worth it."""

    def take(self, requests: Sequence[Request]) -> dict[Request, IdArray]:
        """Return the drafts for requests that the next step extends; there are no further ones for them."""
        if not self._draft_tokens:
            return {}
        taken = self._draft_tokens.keys() & frozenset(requests)
        # In the order of the step: that of a set differs between processes.
        return {request: self._draft_tokens.pop(request) for request in requests if request in taken}

    def num_drafts(self, requests: Iterable[Request]) -> int:
        """Return how many tokens the workers are to draft for these requests after the next step."""
        if self._drafts is None or not self._payoff.may_speculate:
            return 0
        price = min(1.0, self._row_price() + self._draft_cost.price)
        depths = [self._depths.get(request, self._default_depth) for request in requests]
        num_drafts = max((depth.choose(price) for depth in depths if depth.max_depth), default=0)
        self._num_undrafted = 0 if num_drafts else self._num_undrafted + 1
        if self._num_undrafted == PROBE_STEPS and any(depth.max_depth for depth in depths):
            self._num_undrafted = 0
            return min(1, self._default_depth.choose(price))  # in a batch that would draft if drafts were good
        return num_drafts

    def observe(self, record: StepRecord, result: StepResult) -> None:
        """Learn from the result of a step that has been accepted, and draft how its requests continue."""
        if self._config.is_adaptive and record.num_tokens == record.num_decode_tokens:
            self._cost.observe(record.num_tokens, result.elapsed_s - result.drafts_s)
            self._not_ahead_cost.observe(result.idle_s, is_ahead=record.is_ahead)
            period_s = result.elapsed_s + max(0.0, result.idle_s)
            num_decoding, num_tokens = self._batch.num_decoding, len(result.token_ids)
            self._payoff.observe(num_decoding, num_tokens, period_s, has_draft_tokens=bool(record.draft_tokens))
            if timed := result.earlier_drafts or result.drafts:
                num_drafts = max(len(token_ids) for _, token_ids in timed)
                self._draft_cost.observe(num_drafts, result.drafts_s, result.elapsed_s)
        if record.draft_tokens:
            self._learn(record, result)
        if self._drafts is not None:
            self._drafts.keep(record, result)
            self._reveal(record, result)
        self._candidates.clear()
        self._proposals.clear()
        for request in record.sampling:
            self._draft_tokens.pop(request, None)  # they follow fewer tokens than are known by now
            if not self._payoff.may_speculate:
                continue
            if request.state is RequestState.RUNNING and self._batch.may_speculate_for(request):
                self._propose(request)
        self._num_rests = max(0, self._num_rests - 1)
        if not self._candidates:
            self.choose(())

    def take_candidates(self) -> list[tuple[Request, IdArray, int]]:
        """Return the requests with a grammar that may be drafted for, the proposal, and the most tokens of a draft.

        `choose` takes what their grammars make of it. If there are any, the other requests wait for that too.
        """
        taken = [
            (request, candidate, self._depths[request].max_depth + request.num_pending_tokens)
            for request, candidate in self._candidates.items()
        ]
        self._candidates.clear()
        return taken

    def choose(self, draft_tokens: Sequence[tuple[Request, IdArray]]) -> None:
        """Draft as much of this as is worth it, or have requests held until they can be drafted for.

        Not planning ahead costs a part of a step, or a step of those that are held if they are few: so all drafts
        together must be worth more. What the workers have drafted is paid for already, so only rows have a price here.
        """
        price, gain, chosen = self._row_price(), 0.0, list[tuple[Request, Depth, IdArray, int]]()
        for request, draft in [*self._proposals, *draft_tokens]:
            depth = self._depths.get(request)
            if depth is not None and request.state is RequestState.RUNNING and self._batch.may_speculate_for(request):
                # What is computed again takes the rows of drafts: it must not grow with each wrong one.
                most = self._config.max_depth + 1 - request.num_uncomputed_tokens
                num_draft_tokens = min(depth.choose(price), len(draft) - request.num_pending_tokens, most)
                gain += depth.gain(num_draft_tokens, price)
                chosen.append((request, depth, draft, num_draft_tokens))
        self._proposals.clear()
        num_drafts = sum(num_draft_tokens > 0 for *_, num_draft_tokens in chosen)
        is_worth_it = gain > min(num_drafts, self._max_held)
        if draft_tokens:
            rest_steps = self._batch.num_decoding // REQUESTS_PER_REST
            if rest_steps:  # a small batch has none, whatever the batch before it had
                rest_steps = min(max(rest_steps, 2 * self._rest_steps), MAX_RESTS)
            self._num_rests = self._rest_steps = 0 if is_worth_it else rest_steps
        for request, depth, draft, num_draft_tokens in chosen:
            if is_worth_it and num_draft_tokens > 0 and not request.num_pending_tokens:
                self._draft_tokens[request] = until_stop(request, draft[:num_draft_tokens])
                continue
            depth.expected, depth.expected_at = draft[0], len(request.token_ids)
            if is_worth_it and num_draft_tokens > 0:
                self._batch.hold(request)

    @property
    def may_plan_ahead(self) -> bool:
        """Return whether a step may be planned without the requests that wait for their last tokens.

        A step without those that speculate takes almost as long as one with them, which would come after it. But if
        they are few, it is better that they lose a step.
        """
        return self._batch.num_held <= self._max_held

    @property
    def _max_held(self) -> float:
        """How many tokens are lost if the next step is not planned ahead."""
        if not self._config.is_adaptive:
            return 0.0
        num_decoding = self._batch.num_decoding
        return self._not_ahead_cost.price(self._cost.step_s(num_decoding)) * num_decoding

    def withdraw(self, request: Request) -> None:
        """Drop the drafts for a request that is preempted."""
        self._draft_tokens.pop(request, None)
        self._candidates.pop(request, None)

    def forget(self, request: Request) -> None:
        """Drop everything about a request that has ended."""
        self.withdraw(request)
        if self._depths.pop(request, None) is not None:
            self._proposer.forget(request)

    def _row_price(self) -> float:
        """Return how many tokens of a request a step would deliver in the time that the row of one more draft takes.

        A recurrent state goes back to before wrong drafts, so the rows of right ones may come twice.
        """
        if not self._config.is_adaptive:
            return 0.0
        price = self._cost.row_price(max(1, self._batch.num_decoding))
        return min(1.0, 2 * price) if self._batch.has_states else price

    def _learn(self, record: StepRecord, result: StepResult) -> None:
        counters, counts = self._counters, iter(result.counts or [1] * len(record.sampling))
        for request, scheduled in record.chunks:
            if not scheduled.num_samples:
                continue
            num_right = next(counts) - 1
            if scheduled.num_samples == 1:
                continue
            num_draft_tokens = scheduled.num_samples - 1
            counters.spec_decode_num_drafts += 1
            counters.spec_decode_num_draft_tokens += num_draft_tokens
            counters.spec_decode_num_accepted_tokens += num_right
            for position in range(num_right):
                counters.spec_decode_accepted_per_pos[position] = (
                    counters.spec_decode_accepted_per_pos.get(position, 0) + 1
                )
            if (depth := self._depths.get(request)) is not None:
                depth.learn(num_right, was_wrong=num_right < num_draft_tokens)

    def _reveal(self, record: StepRecord, result: StepResult) -> None:
        """Learn what the drafts were that no step has verified and whose ids were not known.

        They are those of the step before, whose slots others may have by now.
        """
        for slot, token_ids in result.earlier_drafts:
            depth = self._depths.get(self._drafted[slot]) if slot in self._drafted else None
            if depth is not None and depth.expected == UNREAD_DRAFT:
                depth.expected = token_ids[0]
        self._drafted = {part.slot: request for request, part in record.chunks} if result.drafts else {}

    def _propose(self, request: Request) -> None:
        depth = self._depths.get(request)
        if depth is None:
            depth = self._depths[request] = self._depth(self._max_depth(request))
        if not depth.max_depth:
            return
        num_known = len(request.token_ids)
        if 0 <= depth.expected_at < num_known and depth.expected != UNREAD_DRAFT:
            is_right = request.token_ids[depth.expected_at] == depth.expected
            depth.learn(int(is_right), was_wrong=not is_right)
        depth.expected_at = -1
        draft = self._proposer.propose(request, depth.max_depth + request.num_pending_tokens)
        if request.needs_step_input:
            if not self._num_rests:
                self._candidates[request] = draft or pack_ids()
        elif draft:
            self._proposals.append((request, draft))

    def _max_depth(self, request: Request) -> int:
        """Return the most tokens that are drafted of a request at a time; 0: it does not speculate."""
        if request.is_pooled or (self._config.method == "grammar" and not request.needs_step_input):
            return 0
        wanted = request.sampling.speculation
        return self._config.max_depth if wanted is None else min(wanted, self._config.max_depth)


def make_proposer(config: ResolvedSpeculation) -> Proposer:
    """Return what drafts by the method of an engine."""
    match config.method:
        case "ngram":
            return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        case "suffix":
            return SuffixProposer(config)
        case "grammar":
            return NoProposer()
        case "draft_model" | "eagle" | "eagle3" | "mtp":
            return DraftProposer()


def until_stop(request: Request, draft: IdArray) -> IdArray:
    """Return the drafts before the first token that ends the request: nothing follows it."""
    for index, token_id in enumerate(draft):
        if token_id in request.stop_tokens:
            return draft[:index]
    return draft
