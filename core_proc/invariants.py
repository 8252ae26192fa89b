"""Invariants that hold between any two calls of the scheduler. Checking is read-only, but too slow for production."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from octavo.core_proc.cache.groups import NULL_BLOCK
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.cache.states import StateSlots
from octavo.core_proc.queued_request import QueuedRequest
from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.adapters import NO_ADAPTER
from octavo.protocol.ids import BlockId
from octavo.protocol.prefix_hash import ROOT_HASH, hash_block
from octavo.protocol.steps import StepPlan


class InvariantBroken(Exception):
    """The scheduler's state is inconsistent. This is a bug of the core, for any input."""


def check(scheduler: Scheduler) -> None:
    """Verify everything that can be verified from the state alone.

    Raises:
        InvariantBroken: an invariant does not hold; the message says which.
    """
    _check_requests(scheduler)
    _check_slots(scheduler)
    _check_adapters(scheduler)
    _check_batch(scheduler)
    _check_steps(scheduler)
    held = {request: _held_blocks(scheduler.cache, request) for request in scheduler.running}
    _check_references(scheduler.cache.pool, held, scheduler.cache.loads.references())
    _check_hashes(scheduler)
    _check_host(scheduler.cache)
    if (states := scheduler.cache.states) is not None:
        _check_states(scheduler, states)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantBroken(message)


def _check_requests(scheduler: Scheduler) -> None:
    """No request is lost, duplicated or in the wrong place, and the counters of each request are consistent."""
    waiting, running = list(scheduler.waiting), list(scheduler.running)
    num_needing_input = sum(request.needs_step_input for request in scheduler.requests.values())
    _require(scheduler.num_needing_input == num_needing_input, "requests that need step input are miscounted")
    swapped = scheduler.cache.loads.swapped
    for name, queue, state in (
        ("waiting", waiting, RequestState.WAITING),
        ("running", running, RequestState.RUNNING),
    ):
        _require(all(request.state is state for request in queue), f"a request in {name} is not {name}")
        _require(all(a.order < b.order for a, b in pairwise(queue)), f"{name} is out of order")
    keys = sorted(request.key for request in [*waiting, *running, *swapped])
    _require(keys == sorted(scheduler.requests), "a live request is in no queue, or in two")
    is_same = all(scheduler.requests[request.key] is request for request in [*waiting, *running, *swapped])
    _require(is_same, "a queue holds another object for a request than `requests`")
    for request in [*waiting, *swapped]:
        if isinstance(request, QueuedRequest):
            continue
        _require(not request.block_ids and request.slot is None, f"waiting {request.request_id} holds something")
        _require(request.num_computed_tokens == 0, f"waiting {request.request_id} has computed tokens")
        _require(request.adapter_slot == NO_ADAPTER, f"waiting {request.request_id} holds a slot of an adapter")
    for request in running:
        _check_progress(scheduler, request)
        is_allowed = scheduler.allowed is None or request.key in scheduler.allowed
        _require(is_allowed, f"{request.request_id} runs though it may not")


def _check_progress(scheduler: Scheduler, request: Request) -> None:
    name, size = request.request_id, scheduler.cache.block_size
    _require(request.num_uncomputed_tokens > 0, f"running {name} has nothing left to compute")
    _check_uncertain_tokens(scheduler, request)
    _require(request.num_known_outputs < request.sampling.max_tokens, f"{name} has too many outputs and runs")
    limit = scheduler.max_model_len + request.is_pooled
    _require(request.num_tokens <= limit, f"{name} is longer than the model's limit")
    num_held = request.num_blocks * size
    _require(num_held >= request.num_computed_tokens, f"{name} has computed tokens outside its blocks")
    # A request keeps the blocks of rejected drafts and of steps that were not executed.
    max_draft_tokens = scheduler.config.num_scheduler_steps - 1
    if scheduler.config.speculation is not None:
        max_draft_tokens = scheduler.config.speculation.max_depth
    _require(num_held < request.num_tokens + max_draft_tokens + size, f"{name} holds blocks it has no tokens for")
    _require(request.num_announced_blocks == request.num_blocks, f"{name} holds blocks no plan announced")
    _check_groups(scheduler, request)


def _check_uncertain_tokens(scheduler: Scheduler, request: Request) -> None:
    """A request with drafts to verify, or with several steps in one plan, has no other pending token and is not
    extended until these are known."""
    name, num_pending, num_uncertain = request.request_id, request.num_pending_tokens, request.num_uncertain_tokens
    _require(num_pending - num_uncertain in range(3), f"{name} has {num_pending} pending tokens")
    is_alone = num_pending == num_uncertain + 1 and request.awaits_token
    _require(not num_uncertain or is_alone, f"{name} is planned ahead of tokens that may not come")
    _require(not request.awaits_token or num_pending > 0, f"{name} awaits a token that no step samples")
    may_have = scheduler.config.speculation is not None or num_uncertain < scheduler.config.num_scheduler_steps
    _require(may_have, f"{name} has drafts though the engine does not speculate")


def _check_groups(scheduler: Scheduler, request: Request) -> None:
    """In each cache group, a request has all blocks that its next token reads, and no more than windows allow."""
    name, groups = request.request_id, scheduler.cache.groups
    _require(len(request.block_ids) == groups.num_lists, f"{name} has blocks of {len(request.block_ids)} groups")
    firsts = [0] * groups.num_groups
    for group in groups.windowed:
        first = firsts[group.index] = request.first_blocks[group.index]
        num_held = request.num_blocks - first
        _require(num_held <= group.max_held, f"{name} holds {num_held} blocks of group {group.index}")
        _require(
            first <= group.first_block(request.num_computed_tokens - request.num_uncertain_tokens),
            f"{name} has lost blocks of its window",
        )
    for first, block_ids in zip(firsts, request.block_ids, strict=False):
        _require(len(block_ids) == request.num_blocks, f"{name} has more blocks in one group than in another")
        is_null = [block_id == NULL_BLOCK for block_id in block_ids]
        _require(all(is_null[:first]) and not any(is_null[first:]), f"{name} holds other blocks than it counts")


def _num_missing(scheduler: Scheduler, request: Request) -> int:
    """Return how many more blocks a running request may need for its current tokens."""
    groups = scheduler.cache.groups
    num_new = max(0, -(-request.num_tokens // groups.block_size) - request.num_blocks)
    num_missing = num_new * groups.num_groups
    # A decode allocates its next block before the blocks that its windows have passed are freed.
    for group in [] if request.is_ready_to_decode else groups.windowed:
        num_held = sum(block_id != NULL_BLOCK for block_id in request.block_ids[group.index])
        num_missing -= max(0, num_new + num_held - group.max_held)
    return num_missing


def _check_slots(scheduler: Scheduler) -> None:
    used = [request.slot for request in scheduler.running]
    _require(
        sorted([slot for slot in used if slot is not None] + scheduler.free_slots)
        == list(range(scheduler.config.max_num_seqs)),
        "slots are lost or shared",
    )


def _check_adapters(scheduler: Scheduler) -> None:
    """Each running request's adapter is in the request's slot, and the users of slots are counted correctly."""
    adapters = scheduler.adapters
    num_users: Counter[int] = Counter()
    for request in scheduler.running:
        slot, adapter = request.adapter_slot, request.adapter
        _require((slot == NO_ADAPTER) == (adapter is None), f"{request.request_id} has another slot than adapter")
        if adapter is not None:
            held = adapters.adapters[slot]
            _require(held is not None and held.digest == adapter.digest, f"slot {slot} lacks {adapter.name}")
            num_users[slot] += 1
    _require(adapters.num_users == [num_users[slot] for slot in range(adapters.num_slots)], "users are miscounted")
    digests = [adapter.digest for adapter in adapters.adapters if adapter]
    _require(len(set(digests)) == len(digests), "two slots hold the same adapter")
    heads = scheduler.waiting.heads()
    _require(not adapters.num_slots or bool(heads) == bool(scheduler.waiting), "waiting requests are in no queue")


def _check_batch(scheduler: Scheduler) -> None:
    """The incrementally updated totals of the batch equal totals computed from scratch."""
    batch = scheduler.batch
    goes_on = [request for request in scheduler.running if request.num_tokens < request.max_num_tokens]
    decoding = [request for request in goes_on if request.is_ready_to_decode]
    awaits_tokens = scheduler.config.pipeline_parallel_size > 1
    extensible = [
        request for request in decoding if not ((awaits_tokens or request.awaits_token) and request.num_pending_tokens)
    ]
    _require(batch.decoding == extensible, "the decoding requests are miscounted")
    _require(batch.num_decoding == len(decoding), "the decoding requests that await a token are miscounted")
    _require([request for request in scheduler.running if request.is_decoding] == decoding, "who decodes is unknown")
    num_to_resume = sum(request.awaits_token for request in scheduler.running)
    _require(batch.num_to_resume == num_to_resume, "the requests that await a token are miscounted")
    prefilling = [request for request in goes_on if not request.is_ready_to_decode]
    _require(list(batch.prefilling) == prefilling, "the prefilling requests are miscounted")
    num_reserved = sum(_num_missing(scheduler, request) for request in goes_on)
    _require(batch.num_reserved_blocks == num_reserved, "the blocks that running requests need are miscounted")


def _check_steps(scheduler: Scheduler) -> None:
    """Steps in flight respect their budget, and each request counts them correctly."""
    num_in_flight: Counter[int] = Counter()
    num_pending: Counter[int] = Counter()
    is_pipelined = scheduler.config.pipeline_parallel_size > 1
    for record in scheduler.in_flight:
        num_tokens = sum(scheduled.num_tokens for scheduled in record.scheduled)
        _require(0 < num_tokens <= scheduler.config.max_num_batched_tokens, f"step of {num_tokens} tokens")
        slots = {scheduled.slot for scheduled in record.scheduled}
        _require(len(slots) == len(record.requests), "two chunks of a step share a slot")
        needs_input = any(request.needs_step_input for request in record.sampling)
        _require(needs_input or not record.awaits_input, "a step awaits input that no request needs")
        for request, scheduled in record.chunks:
            _require(scheduled.num_tokens > 0, "an empty chunk")
            num_in_flight[id(request)] += 1
            num_pending[id(request)] += scheduled.num_samples
    for live in scheduler.requests.values():
        _require(live.num_in_flight == num_in_flight[id(live)], f"{live.request_id} miscounts its steps")
        _require(live.num_pending_tokens == num_pending[id(live)], f"{live.request_id} miscounts its placeholders")
        num_unknown = live.num_pending_tokens - (live.num_uncertain_tokens if isinstance(live, Request) else 0)
        _require(num_unknown < 2 or not is_pipelined, f"{live.request_id} is in two steps that sample it")


def _check_references(
    pool: BlockPool,
    held: Mapping[Request, Sequence[BlockId]],
    loading: Sequence[tuple[Request, Sequence[BlockId]]] = (),
) -> None:
    """Reference counts are exact, and a block is free exactly if no request and no load refers to it."""
    parts = [*held.values(), *(block_ids for _, block_ids in loading)]
    references = Counter(block_id for block_ids in parts for block_id in block_ids)
    free = list(pool.free_blocks())
    _require(len(free) == pool.num_free == len(set(free)), "the free list is damaged")
    for block_id in range(pool.num_blocks):
        _require(pool.num_references(block_id) == references[block_id], f"block {block_id}: wrong reference count")
    _require(set(free).isdisjoint(references), "a block is both free and referenced")
    _require(len(free) + len(references) == pool.num_blocks, "a block is lost")
    for request, block_ids in held.items():
        _require(len(set(block_ids)) == len(block_ids), f"{request.request_id} holds a block twice")


def _check_states(scheduler: Scheduler, states: StateSlots) -> None:
    """Each started request holds its state, at most the planned number of slots, and exclusively owns the slot it
    writes."""
    group, size = states.group, scheduler.cache.block_size
    held = {request: states.held(request) for request in scheduler.running}
    _check_references(states.pool, held)
    _require(len(held) <= states.max_requests, "more requests run than there are slots of states for")
    for request, slots in held.items():
        name, entries = request.request_id, request.block_ids[group.index]
        _require(len(entries) == request.num_blocks, f"{name} has more entries of states than blocks")
        _require(len(slots) <= group.max_held, f"{name} holds {len(slots)} states")
        _require(not entries or entries[-1] != NULL_BLOCK, f"{name} has no slot for its state")
        is_at_checkpoint = request.num_computed_tokens == request.num_blocks * size
        if slots and not is_at_checkpoint:
            own = entries[-1]
            is_own = states.pool.num_references(own) == 1 and states.pool.block_hash(own) is None
            _require(is_own, f"{name} writes to a checkpoint")
    for block_hash, slot in states.pool.cached_blocks().items():
        _require(states.pool.block_hash(slot) == block_hash, f"state {slot}: its hash and the map differ")
    _require(bool(group.interval) or not states.pool.cached_blocks(), "checkpoints are kept though they are off")


def _check_host(cache: PrefixCache) -> None:
    """Each slot of host memory is accounted for. Pinned slots belong to loads, or to loaded blocks not yet in use."""
    for tier in cache.host_tiers:
        fault = tier.check(cache.loads.pins(tier))
        _require(not fault, fault)


def _held_blocks(cache: PrefixCache, request: Request) -> list[BlockId]:
    """Return the blocks of a request in the block pool."""
    lists = request.block_ids[: cache.num_groups]
    return [block_id for block_ids in lists for block_id in block_ids if block_id != NULL_BLOCK]


def _check_hashes(scheduler: Scheduler) -> None:
    """The map of hashes is consistent, and a shared block holds the contents that each of its owners expects."""
    pool, size = scheduler.cache.pool, scheduler.cache.block_size
    hashed = pool.cached_blocks()
    for block_hash, block_id in hashed.items():
        _require(pool.block_hash(block_id) == block_hash, f"block {block_id}: its hash and the map differ")
    num_hashed = sum(pool.block_hash(block_id) is not None for block_id in range(pool.num_blocks))
    _require(num_hashed == len(hashed), "a hashed block is missing from the map")
    _require(scheduler.cache.is_enabled or not hashed, "blocks are hashed though prefix caching is off")
    for request in scheduler.running:
        parent = ROOT_HASH
        num_computed = request.num_computed_tokens
        if (states := scheduler.cache.states) is not None and (before := states.pre_draft_state(request)) is not None:
            num_computed = max(num_computed, before.num_stored)
        num_known = min(num_computed, len(request.token_ids))
        for index in range(request.num_blocks):
            own_hash = None
            if (index + 1) * size <= num_known:
                token_ids = request.token_ids[index * size : (index + 1) * size]
                parent = own_hash = hash_block(parent, token_ids, index * size, request.extra_keys)
            for group, suffix in enumerate(scheduler.cache.groups.key_suffixes):
                block_id = request.block_ids[group][index]
                if block_id == NULL_BLOCK:
                    continue
                _require(
                    pool.block_hash(block_id) in (None, own_hash and own_hash + suffix),
                    f"{request.request_id}: block {index} is hashed for what it does not hold",
                )
                _require(
                    pool.num_references(block_id) == 1 or own_hash is not None,
                    f"{request.request_id}: block {index} is shared without being full and known",
                )


def check_loss(scheduler: Scheduler) -> None:
    """Verify right after `lose_workers()` that nothing refers to the lost workers' memory.

    Raises:
        InvariantBroken: a request, slot, block or step still counts as if the workers had it.
    """
    check(scheduler)
    _require(not scheduler.running.first and not scheduler.in_flight, "something runs without workers")
    _require(not scheduler.cache.loads.references(), "blocks are loaded without workers")
    for pool in scheduler.cache.pools:
        _require(not pool.cached_blocks(), "contents of lost blocks can still be found")
        _require(pool.num_free == pool.num_blocks, "blocks are held without workers")
    for tier in scheduler.cache.host_tiers:
        _require(not len(tier) and not tier.has_copies, "host memory has contents or copies without workers")
        _require(not scheduler.cache.loads.pins(tier), "host memory is kept without workers")
    _require(len(scheduler.free_slots) == scheduler.config.max_num_seqs, "slots are held without workers")


def check_plan(scheduler: Scheduler, plan: StepPlan | None) -> None:
    """Verify right after `plan()` that requests that can progress do, and that requests start in order.

    Raises:
        InvariantBroken: live requests may run, but neither a step in flight nor this plan advances any of them; or a
            waiting request was overtaken.
    """
    check(scheduler)
    candidate = scheduler.admission.candidate().request
    may_any_run = bool(scheduler.running.first or candidate)
    is_stuck = plan is None and may_any_run and not scheduler.in_flight and not scheduler.cache.loads.in_flight
    _require(not is_stuck, "requests live, nothing is in flight, and no step was planned")
    slots = {admitted.slot for admitted in plan.admitted} if plan else ()
    for request in scheduler.running if slots and candidate else ():
        is_fair = candidate is None or request.slot not in slots or request.order < candidate.order
        _require(is_fair, f"{request.request_id} has started before a request that is ahead of it in the queue")
