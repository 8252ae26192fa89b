"""`Speculation`: decides for which requests the next step verifies drafts, and learns from every result.

Part of the scheduler, not of the workers: drafts depend on known tokens and on step times. A recording contains both,
so a replay makes the same drafts.
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

    Only a request whose last token is known can have drafts. Requests are planned ahead, so a request with a draft is
    first held until the steps in flight have sampled its tokens.

    Args:
        config: method and limits.
        batch: the running requests; it holds requests that wait for a token.
        counters: counters of drafts and accepted tokens; updated.
    """

    def __init__(self, config: ResolvedSpeculation, batch: RunningBatch, counters: EngineStats) -> None:
        self._config = config
        self._batch = batch
        self._counters = counters
        self._proposer = make_proposer(config)
        self._drafts = self._proposer if isinstance(self._proposer, DraftProposer) else None
        """The proposer of drafts made by the workers. None if the workers make none."""
        self._depth = Depth if config.is_adaptive else FixedDepth
        self._default_depth = self._depth(config.max_depth)
        self._cost, self._draft_cost, self._not_ahead_cost = StepCost(), DraftCost(), NotAheadCost()
        self._payoff = Payoff()
        self._num_undrafted = 0
        """Number of steps since the workers last drafted."""
        self._depths: dict[Request, Depth] = {}
        self._drafted: dict[SlotId, Request] = {}
        """Requests for which the workers drafted after the latest step, by their slots in that step."""
        self._draft_tokens: dict[Request, IdArray] = {}
        """Drafts for the next step, by request."""
        self._candidates: dict[Request, IdArray] = {}
        """Proposals for requests with a grammar, until the grammar has checked them."""
        self._proposals: list[tuple[Request, IdArray]] = []
        """Proposals for the other requests, which wait for the grammars too."""
        self._num_rests = 0
        """Number of steps to skip before grammars are asked again."""
        self._rest_steps = 0
        """Number of steps that were skipped after grammars were last asked; 0 if their drafts paid off."""

    def take(self, requests: Sequence[Request]) -> dict[Request, IdArray]:
        """Remove and return the drafts for requests that the next step extends."""
        if not self._draft_tokens:
            return {}
        taken = self._draft_tokens.keys() & frozenset(requests)
        # In the order of the step, because the order of a set differs between processes.
        return {request: self._draft_tokens.pop(request) for request in requests if request in taken}

    def num_drafts(self, requests: Iterable[Request]) -> int:
        """Return how many tokens per request the workers should draft after the next step."""
        if self._drafts is None or not self._payoff.may_speculate:
            return 0
        price = min(1.0, self._row_price() + self._draft_cost.price)
        depths = [self._depths.get(request, self._default_depth) for request in requests]
        num_drafts = max((depth.choose(price) for depth in depths if depth.max_depth), default=0)
        self._num_undrafted = 0 if num_drafts else self._num_undrafted + 1
        if self._num_undrafted == PROBE_STEPS and any(depth.max_depth for depth in depths):
            self._num_undrafted = 0
            return min(1, self._default_depth.choose(price))  # probe a batch that would draft if its drafts were good
        return num_drafts

    def observe(self, record: StepRecord, result: StepResult) -> None:
        """Learn from the result of a step, which was applied before, and draft how its requests continue."""
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
        """Return the requests with a grammar that may have drafts, with their proposals and the most tokens of a draft.

        `choose` receives the drafts that their grammars make of them. If there are any candidates, the other requests
        wait too.
        """
        taken = [
            (request, candidate, self._depths[request].max_depth + request.num_pending_tokens)
            for request, candidate in self._candidates.items()
        ]
        self._candidates.clear()
        return taken

    def choose(self, draft_tokens: Sequence[tuple[Request, IdArray]]) -> None:
        """Choose as many drafts as pay off, or hold requests until they can have drafts.

        Not planning ahead costs a fraction of a step, or, if few requests are held, one token for each of them. All
        drafts together must gain more than that. Drafts made by the workers are already paid for, so only rows have a
        cost here.
        """
        price, gain, chosen = self._row_price(), 0.0, list[tuple[Request, Depth, IdArray, int]]()
        for request, draft in [*self._proposals, *draft_tokens]:
            depth = self._depths.get(request)
            if depth is not None and request.state is RequestState.RUNNING and self._batch.may_speculate_for(request):
                # Tokens to recompute use up rows of drafts, so that the number of rows does not grow with each rejected
                # draft.
                most = self._config.max_depth + 1 - request.num_uncomputed_tokens
                num_draft_tokens = min(depth.choose(price), len(draft) - request.num_pending_tokens, most)
                gain += depth.gain(num_draft_tokens, price)
                chosen.append((request, depth, draft, num_draft_tokens))
        self._proposals.clear()
        num_drafts = sum(num_draft_tokens > 0 for *_, num_draft_tokens in chosen)
        is_worth_it = gain > min(num_drafts, self._max_held)
        if draft_tokens:
            rest_steps = self._batch.num_decoding // REQUESTS_PER_REST
            if rest_steps:  # a small batch never skips, whatever the previous batch did
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

        A step without them takes almost as long as one with them, which would follow it. But if only few requests wait,
        it is better that they miss a step.
        """
        return self._batch.num_held <= self._max_held

    @property
    def _max_held(self) -> float:
        """Number of tokens lost if the next step is not planned ahead."""
        if not self._config.is_adaptive:
            return 0.0
        num_decoding = self._batch.num_decoding
        return self._not_ahead_cost.price(self._cost.step_s(num_decoding)) * num_decoding

    def withdraw(self, request: Request) -> None:
        """Drop the drafts of a request that is preempted."""
        self._draft_tokens.pop(request, None)
        self._candidates.pop(request, None)

    def forget(self, request: Request) -> None:
        """Drop all state of a request that has ended."""
        self.withdraw(request)
        if self._depths.pop(request, None) is not None:
            self._proposer.forget(request)

    def _row_price(self) -> float:
        """Return how many tokens per request a step would deliver in the time of one more draft row.

        With recurrent states, accepted tokens are recomputed after a rejected draft, so their rows may be needed twice.
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
        """Learn the ids of drafts that no step has verified and whose ids were unknown.

        These are the drafts of the previous step, whose slots may belong to other requests by now.
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
        """Return the most tokens drafted at a time for a request; 0 if it does not speculate."""
        if request.is_pooled or (self._config.method == "grammar" and not request.needs_step_input):
            return 0
        wanted = request.sampling.speculation
        return self._config.max_depth if wanted is None else min(wanted, self._config.max_depth)


def make_proposer(config: ResolvedSpeculation) -> Proposer:
    """Return the proposer for the method of an engine."""
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
    """Return the drafts before the first token that ends the request, because nothing follows it."""
    for index, token_id in enumerate(draft):
        if token_id in request.stop_tokens:
            return draft[:index]
    return draft
