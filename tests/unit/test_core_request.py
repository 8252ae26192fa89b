"""The request's state machine, and the arithmetic of fair shares."""

import itertools

import pytest

from octavo.core_proc.request import REQUEST_TRANSITIONS, Request, RequestState
from octavo.core_proc.scheduler.budget import fair_share, first_chunk
from octavo.core_proc.scheduler.policy import OrderedRequests, order_of
from octavo.protocol.errors import IllegalTransition
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit


def request(order: int = 0, state: RequestState = RequestState.WAITING) -> Request:
    made = Request(b"c", Submit("r", [1, 2, 3], SamplingSpec(max_tokens=4, seed=0)), order, now=1.0)
    made.state = state
    return made


@pytest.mark.parametrize(("source", "target"), list(itertools.product(RequestState, repeat=2)))
def test_only_the_moves_of_the_table_are_possible(source: RequestState, target: RequestState):
    moving = request(state=source)
    if target in REQUEST_TRANSITIONS[source]:
        moving.move(target)
        assert moving.state is target
    else:
        with pytest.raises(IllegalTransition, match=f"{source.value} to {target.value}"):
            moving.move(target)
        assert moving.state is source


def test_every_state_can_end_and_the_end_is_final():
    assert all(
        RequestState.FINISHED in moves
        for state, moves in REQUEST_TRANSITIONS.items()
        if state is not RequestState.FINISHED
    )
    assert not REQUEST_TRANSITIONS[RequestState.FINISHED]


def test_ordered_requests():
    queue = OrderedRequests()
    requests = [request(order_of("priority", priority, arrival)) for arrival, priority in enumerate([1, 0, 1, -1])]
    for member in requests:
        queue.add(member)
    assert list(queue) == [requests[index] for index in (3, 1, 0, 2)]
    assert (queue.first, queue.last) == (requests[3], requests[2])
    queue.remove(requests[1])
    with pytest.raises(KeyError):
        queue.remove(requests[1])
    assert len(queue) == 3


def test_fcfs_is_the_order_of_arrival():
    assert order_of("fcfs", priority=-5, arrival=7) == 7


@pytest.mark.parametrize(
    ("num_tokens", "num_requests", "share"), [(100, 1, 100), (100, 3, 32), (100, 30, 4), (2, 1, 4), (101, 1, 100)]
)
def test_fair_share_is_whole_blocks(num_tokens: int, num_requests: int, share: int):
    assert fair_share(num_tokens, num_requests, block_size=4) == share


@pytest.mark.parametrize(
    ("start", "num_uncomputed", "share", "limit", "chunk"),
    [
        (0, 10, 16, 100, 10),  # all of it
        (0, 50, 16, 100, 16),
        (2, 50, 16, 100, 14),  # ends at a block's edge
        (2, 50, 16, 1, 1),  # no edge within reach
        (3, 50, 16, 0, 0),
        (0, 50, 16, 7, 4),
    ],
)
def test_first_chunk(start: int, num_uncomputed: int, share: int, limit: int, chunk: int):
    assert first_chunk(start, num_uncomputed, share, limit, block_size=4) == chunk
