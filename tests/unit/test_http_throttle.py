"""A burst of work is started in portions and in order, so the event loop can do other work in between."""

import asyncio

from octavo.frontend.http.throttle import MAX_AT_ONCE, Throttle


def test_what_comes_alone_is_done_at_once() -> None:
    async def main() -> None:
        done: list[int] = []
        throttle = Throttle()
        for number in range(3):
            throttle.run(lambda number=number: done.append(number))
            assert done[-1] == number
            await asyncio.sleep(0)

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
        return portions

    portions = asyncio.run(main())
    assert max(portions) <= MAX_AT_ONCE
    assert len(portions) >= 9
