"""Admission of waiting requests, and the cost of a long queue."""

import random
from collections import Counter

import pytest
from core_fakes import FakeEngine

from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.policy import OrderedRequests
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit


def make_request(number: int, order: int) -> Request:
    return Request(b"", Submit(str(number), [1] * (number % 7 + 1), SamplingSpec(max_tokens=1, seed=0)), order, 0.0)


@pytest.mark.parametrize("num_priorities", [1, 3, 1000])
def test_the_queue_is_sorted_whatever_is_added_and_removed(num_priorities):
    random_source = random.Random(num_priorities)
    queue, expected = OrderedRequests(), dict[int, Request]()
    for number in range(6000):
        if expected and random_source.random() < 0.4:
            request = expected.pop(random_source.choice(list(expected)[:40] + list(expected)[-40:]))
            queue.remove(request)
            with pytest.raises(KeyError):
                queue.remove(request)
        else:
            request = make_request(number, random_source.randrange(num_priorities) * 6000 + number)
            expected[request.order] = request
            queue.add(request)
    in_order = [request for _, request in sorted(expected.items())]
    assert list(queue) == in_order and len(queue) == len(in_order)
    assert (queue.first, queue.last) == (in_order[0], in_order[-1])
    assert queue.num_prompt_tokens == sum(request.num_prompt_tokens for request in in_order)
    for request in random_source.sample(in_order, len(in_order)):
        queue.remove(request)
    assert not len(queue) and queue.first is None and queue.last is None and queue.num_prompt_tokens == 0


class CountedList(list):
    """Counts the elements that insertions and deletions move."""

    num_moved = 0

    def insert(self, index, value):
        CountedList.num_moved += len(self) - index
        super().insert(index, value)

    def __delitem__(self, index):
        if not isinstance(index, slice):
            CountedList.num_moved += len(self) - index
        super().__delitem__(index)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_cost_of_an_abort_does_not_grow_with_the_queue(is_reversed, monkeypatch):
    moved = []
    for num_requests in (2_000, 20_000):
        queue = OrderedRequests()
        requests = [make_request(index, (0, index)) for index in range(num_requests)]
        for request in requests:
            queue.add(request)
        queue._chunks = [CountedList(chunk) for chunk in queue._chunks]
        CountedList.num_moved = 0
        for request in reversed(requests) if is_reversed else requests:
            queue.remove(request)
        moved.append(CountedList.num_moved / num_requests)
    assert moved[1] < 1.5 * moved[0] + 1


def test_a_blocked_head_looks_its_prefix_up_once(monkeypatch):
    engine = FakeEngine(num_blocks=20, max_model_len=80, async_scheduling=False)
    engine.submit("first", [1] * 30, max_tokens=45)
    engine.turn()
    engine.turn()
    engine.submit("head", [2] * 60, max_tokens=1)
    lookups: Counter[bytes] = Counter()
    find = BlockPool.find

    def counted_find(pool: BlockPool, block_hash: bytes) -> int | None:
        lookups[block_hash] += 1
        return find(pool, block_hash)

    monkeypatch.setattr(BlockPool, "find", counted_find)
    for _ in range(40):
        engine.turn()
    assert engine.scheduler.stats().waiting_reason == "blocks"
    assert sum(lookups.values()) == 1, "its first block is not there, and nothing has changed that"


def test_a_blocked_head_sees_blocks_that_appear_and_disappear():
    engine = FakeEngine(num_blocks=20, max_model_len=80, async_scheduling=False)
    engine.submit("first", [1] * 30, max_tokens=30)
    engine.turn()
    engine.submit("head", [1] * 50 + [2], max_tokens=1)
    scheduler = engine.scheduler
    head = scheduler.waiting.first
    assert head is not None
    for _ in range(20):
        engine.turn()
        if head.block_ids:
            break
        counted, num_free_counted = scheduler.cache.count_hits(head)
        found = scheduler.cache.lookup._find(head)
        num_free = [sum(map(scheduler.cache.pool.is_free, ids)) for ids in found.block_ids]
        assert (counted.num_blocks, num_free_counted) == (found.num_blocks, num_free)
    engine.run()
    assert engine.outputs["head"].num_cached_tokens > 0
