"""A burst of work is started in portions and in order, so the event loop can do other work in between."""

import asyncio
import contextlib
import socket
from itertools import pairwise

from waiting import until

from octavo.frontend.http.throttle import MAX_AT_ONCE, Throttle


def test_a_single_item_is_handled_at_once() -> None:
    async def main() -> None:
        done: list[int] = []
        throttle = Throttle()
        for number in range(3):
            throttle.run(lambda number=number: done.append(number))
            assert done[-1] == number
            await asyncio.sleep(0)
        throttle.close()

    asyncio.run(main())


def test_a_flood_is_done_in_order_some_in_each_turn() -> None:
    async def main() -> list[int]:
        done: list[int] = []
        throttle = Throttle()
        for number in range(10 * MAX_AT_ONCE):
            throttle.run(lambda number=number: done.append(number))
        portions = []
        while len(done) < 10 * MAX_AT_ONCE:
            before = len(done)
            await asyncio.sleep(0)
            portions.append(len(done) - before)
        assert done == sorted(done)
        throttle.run(lambda: done.append(-1))
        await asyncio.sleep(0)
        assert done[-1] == -1
        throttle.close()
        return portions

    portions = asyncio.run(main())
    assert max(portions) <= MAX_AT_ONCE
    assert len(portions) >= 9


def test_sockets_that_are_ready_get_their_turn_in_order_probes_first() -> None:
    probe, gone, forgotten = 20, 21, 22

    async def main() -> None:
        done: list[int] = []
        num_done: list[int] = []
        pairs = [socket.socketpair() for _ in range(5 * MAX_AT_ONCE + 20)]
        expected = [number for number in range(len(pairs)) if number not in (probe, forgotten)]
        throttle = Throttle()
        with contextlib.ExitStack() as stack:
            stack.callback(throttle.close)
            for number, (ours, theirs) in enumerate(pairs):
                stack.enter_context(ours)
                stack.enter_context(theirs)
                ours.setblocking(False)
                throttle.watch(ours, lambda number=number: done.append(number))
                if number == gone:
                    theirs.close()
                else:
                    theirs.sendall(b"GET /health HTTP/1.1" if number == probe else b"GET /healthy HTTP/1.1")
            for _ in range(2):  # to forget what is not watched does nothing
                throttle.forget(pairs[forgotten][0])
            async with asyncio.timeout(30):
                while len(done) <= len(expected):
                    num_done.append(len(done))
                    await asyncio.sleep(0)
            assert done == [probe, *expected]
            assert max(after - before for before, after in pairwise(num_done)) <= MAX_AT_ONCE + 1
            throttle.watch(pairs[0][0], done.clear)  # its data are still unread
            await until(lambda: not done)

    asyncio.run(main())
