"""The running requests: which decode, which prefill, and how many blocks they need next.

perf: in most steps every request decodes one token and nothing else changes. So totals are updated incrementally, and
`decode()` is the only loop over all requests. It does extra work only for requests that have reached `next_plan_check`.
`max_decode_steps()`, `hold()` and `resume()` also loop, but only with multi-step plans or requests that wait for their
last token.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.policy import OrderedRequests
from octavo.protocol.steps import Scheduled


class RunningBatch:
    """All running requests, in order.

    A request decodes if one token is left to compute. It prefills if more are left: of its prompt, or to recompute
    after a preemption. A request that the tokens in flight will certainly finish is in neither list.

    Args:
        cache: allocates blocks.
        awaits_tokens: whether a request may be extended only when its last token is known. It counts as decoding
            meanwhile.
    """

    def __init__(self, cache: PrefixCache, *, awaits_tokens: bool = False) -> None:
        self.requests = OrderedRequests[Request]()
        self.decoding: list[Request] = []
        """Requests that may be extended by one token, in order."""
        self.prefilling = OrderedRequests[Request]()
        """Requests that prefill."""
        self.grown: dict[Request, None] = {}
        """Requests that may have blocks that were not yet sent to the workers."""
        self._decoding_orders: list[int] = []
        self._num_awaiting = 0
        """Number of requests that decode and wait for their last token to become known."""
        self._awaits_tokens = awaits_tokens
        self.num_to_resume = 0
        """Number of requests with `awaits_token`, decoding or not. perf: `resume` loops only if there are any."""
        self._num_needing_block = 0
        """Number of decoding requests whose next token needs a new block in each group."""
        self._cache = cache

    @property
    def has_states(self) -> bool:
        """Whether requests have recurrent states."""
        return self._cache.states is not None

    def add(self, request: Request) -> None:
        """Add a request that starts. It prefills in its first step, even if only one token is left to compute."""
        self.requests.add(request)
        self.prefilling.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ends or is preempted. It keeps its blocks."""
        self.requests.remove(request)
        self.grown.pop(request, None)
        self._leave(request)
        self._set_awaits_token(request, False)

    def withdraw(self, request: Request) -> None:
        """Take a running request out of its list while its number of computed tokens changes; `update` puts it back."""
        self._leave(request)

    def update(self, request: Request) -> None:
        """Reclassify a running request after its number of uncomputed tokens or blocks has changed."""
        self._leave(request)
        self._enter(request)

    @property
    def num_decoding(self) -> int:
        """Number of requests that decode, including those that wait for their last token."""
        return len(self.decoding) + self._num_awaiting

    @property
    def num_held(self) -> int:
        """Number of requests that decode and wait for their last token."""
        return self._num_awaiting

    def hold(self, request: Request) -> None:
        """Do not extend a request until its last token is known."""
        if request.num_pending_tokens and not request.awaits_token:
            is_decoding = request.is_decoding
            self._leave(request)
            self._set_awaits_token(request, True)
            if is_decoding:
                self._enter(request)

    def resume(self, requests: Iterable[Request]) -> None:
        """Make requests extendable again whose last tokens have become known, if they still decode."""
        if self._awaits_tokens or self.num_to_resume:
            for request in requests:
                if request.num_pending_tokens:
                    continue
                self._set_awaits_token(request, False)
                if request.is_decoding and self._place(request) is None:
                    self._num_awaiting -= 1
                    self._insert(request)

    @property
    def num_reserved_blocks(self) -> int:
        """Number of free blocks that running requests need for their tokens, computed or not.

        The rest of a prompt counts completely. Otherwise two prompts that do not fit together could start together and
        preempt each other.
        """
        num_missing = self._cache.num_missing_blocks
        num_decoding = self._num_needing_block * self._cache.num_groups
        return num_decoding + sum([num_missing(request, request.num_tokens) for request in self.prefilling])

    def victim(self) -> Request | None:
        """Return the request to preempt before the next step. Return None if the free blocks suffice.

        A preempted request loses no token: its prompt and outputs are recomputed when it runs again. The first request
        is never preempted unless it is the only one, and a single request always fits. So the first request always
        progresses.
        """
        return None if self.num_reserved_blocks <= self._cache.pool.num_free else self.requests.last

    def max_decode_steps(self, most: int) -> int:
        """Return by how many tokens the free blocks allow all decoding requests to be extended at once.

        Args:
            most: upper limit; at least 1.
        """
        num_steps, states = most, self._cache.states
        for request in self.decoding:
            num_steps = min(num_steps, request.max_num_tokens - request.num_tokens)
            if states is not None:
                num_steps = min(num_steps, states.max_decode_steps(request))
            if num_steps == 1:
                return 1
        size, num_lists = self._cache.block_size, self._cache.num_groups

        def num_new_blocks(num_steps: int) -> int:
            ends = [(request, request.num_computed_tokens + num_steps) for request in self.decoding]
            return sum([max(0, -(-end // size) - request.num_blocks) for request, end in ends]) * num_lists

        num_free = self._cache.pool.num_free
        if num_new_blocks(num_steps) <= num_free:
            return num_steps
        return max(1, bisect_right(range(1, num_steps), num_free, key=num_new_blocks))

    def decode(self, num_requests: int, num_steps: int = 1) -> tuple[list[Request], list[Scheduled], list[Request]]:
        """Extend the first decoding requests by one token for each step.

        With several steps, the requests are not extended again until their new tokens are known.

        Returns:
            The requests, what the step computes for each, and the requests that reached `next_plan_check`.
        """
        requests = self.decoding[:num_requests]
        checked: list[Request] = []
        scheduled: list[Scheduled] = []
        schedule = scheduled.append
        for request in requests:
            start = request.num_computed_tokens
            end = start + num_steps
            if end >= request.next_plan_check:
                self._check(request, end)
                checked.append(request)
                self.grown[request] = None
            request.num_computed_tokens = end
            request.num_pending_tokens += num_steps
            request.num_in_flight += 1
            schedule(Scheduled(request.slot, start, num_steps, num_steps))  # type: ignore[arg-type]  # a running request has a slot
        for request in checked:
            if request.num_tokens >= request.max_num_tokens:
                self._leave(request)
        if num_steps > 1:
            for request in requests:
                request.num_uncertain_tokens = num_steps - 1
                self.hold(request)
        if self._awaits_tokens:
            num_remaining = sum(request.is_decoding for request in requests)
            del self.decoding[:num_remaining], self._decoding_orders[:num_remaining]
            self._num_awaiting += num_remaining
        return requests, scheduled, checked

    def may_speculate_for(self, request: Request) -> bool:
        """Return whether drafts may follow the tokens that the next step computes for a running request."""
        states = self._cache.states
        return request.is_decoding or (states is not None and states.has_pre_draft_state(request))

    def add_drafts(self, request: Request, num_draft_tokens: int) -> int:
        """Extend a request by drafts, as far as spare blocks allow. This step computes all of its known tokens.

        Returns:
            The number of drafts added.
        """
        size, end = self._cache.block_size, request.num_computed_tokens
        num_draft_tokens = min(num_draft_tokens, request.max_num_tokens - (end + 1))
        if (states := self._cache.states) is not None:
            num_draft_tokens = min(num_draft_tokens, states.max_draft_tokens(request, end))
        if num_draft_tokens > request.num_blocks * size - end:
            num_spare = self._cache.pool.num_free - self.num_reserved_blocks
            num_spare += self.needs_new_block(request) * self._cache.num_groups  # reserved for this request
            if self._cache.num_missing_blocks(request, end + num_draft_tokens) > num_spare:
                num_draft_tokens = request.num_blocks * size - end
        if num_draft_tokens <= 0:
            return 0
        self._leave(request)
        self._cache.extend(request, end + num_draft_tokens)
        if states is not None:
            states.keep_pre_draft_state(request)
        self.grown[request] = None
        request.num_computed_tokens += num_draft_tokens
        request.num_pending_tokens += num_draft_tokens
        request.num_uncertain_tokens = num_draft_tokens
        self._set_awaits_token(request, True)
        self._enter(request)
        return num_draft_tokens

    def _set_awaits_token(self, request: Request, awaits_token: bool) -> None:
        self.num_to_resume += awaits_token - request.awaits_token
        request.awaits_token = awaits_token

    def _check(self, request: Request, end: int) -> None:
        """Allocate and hash the blocks that are due when a decoding request grows to `end` tokens."""
        self._num_needing_block -= self.needs_new_block(request)
        self._cache.extend(request, end)
        request.num_computed_tokens = end
        self._cache.cache_full_blocks(request)
        self._num_needing_block += self.needs_new_block(request)
        self._set_next_check(request)

    def needs_new_block(self, request: Request) -> bool:
        """Return whether a request decodes and its next token needs a new block in each group."""
        return request.is_decoding and request.num_computed_tokens == request.num_blocks * self._cache.block_size

    def _set_next_check(self, request: Request) -> None:
        if request.num_computed_tokens < request.num_prompt_tokens or self._cache.has_unhashed_block(request):
            request.next_plan_check = 0
        else:
            request.next_plan_check = min(request.num_blocks * self._cache.block_size, request.max_num_tokens - 1)

    def _enter(self, request: Request) -> None:
        """Put a request into the list that matches its number of uncomputed tokens."""
        if request.num_tokens >= request.max_num_tokens:
            return
        if not request.is_ready_to_decode:
            self.prefilling.add(request)
            return
        request.is_decoding = True
        if request.num_pending_tokens and (self._awaits_tokens or request.awaits_token):
            self._num_awaiting += 1
        else:
            self._insert(request)
        self._num_needing_block += self.needs_new_block(request)
        self._set_next_check(request)

    def _leave(self, request: Request) -> None:
        if request.is_decoding:
            self._num_needing_block -= self.needs_new_block(request)
            request.is_decoding = False
            if (index := self._place(request)) is None:
                self._num_awaiting -= 1
            else:
                del self.decoding[index], self._decoding_orders[index]
        elif request in self.prefilling:
            self.prefilling.remove(request)

    def _insert(self, request: Request) -> None:
        index = bisect_left(self._decoding_orders, request.order)
        self.decoding.insert(index, request)
        self._decoding_orders.insert(index, request.order)

    def _place(self, request: Request) -> int | None:
        """Return the index of a request in `decoding`. Return None if it is not there."""
        index = bisect_left(self._decoding_orders, request.order)
        return index if index < len(self.decoding) and self.decoding[index] is request else None
