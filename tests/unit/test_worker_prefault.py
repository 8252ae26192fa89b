"""Memory that is taken ahead of use: which pages, in which order, and that nothing in them changes."""

import pytest
import torch

from octavo.kernels.native.memory import HUGE_PAGE_BYTES, SLAB_BYTES, allocate
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Appended, StepPlan
from octavo.worker_proc.cache.prefault import IDLE_MS, Prefaulter

NUM_BLOCKS = 64
BLOCKS_PER_PAGE = 16


NUM_PAGES = NUM_BLOCKS // BLOCKS_PER_PAGE


def buffers(num: int, page_offset: int = 0) -> list[torch.Tensor]:
    """Return buffers that begin at this offset in a huge page, all of it sevens."""
    with torch.inference_mode():
        return [allocate(SLAB_BYTES, page_offset)[: NUM_PAGES * HUGE_PAGE_BYTES].fill_(7) for _ in range(num)]


def plan(admitted: list[int], appended: list[int]) -> StepPlan:
    request = Admitted(0, "r", pack_ids([1]), 1, [admitted], SamplingSpec(max_tokens=1, seed=0))
    return StepPlan(0, [], [request], [Appended(0, [appended])], [])


def num_pages(prefaulter: Prefaulter) -> int:
    count = 0
    while prefaulter.has_pages:
        prefaulter.touch_page()
        count += 1
    return count


def test_nothing_is_taken_before_the_first_use() -> None:
    assert not Prefaulter(buffers(2), NUM_BLOCKS).has_pages


@pytest.mark.parametrize("is_admitted", [True, False])
def test_the_page_in_use_and_the_next_are_taken_once_in_every_buffer(is_admitted: bool) -> None:
    prefaulter = Prefaulter(buffers(3), NUM_BLOCKS, reserve_bytes=0)
    prefaulter.on_plan(plan([2, 0], []) if is_admitted else plan([], [0, 2]), num_groups=1)
    assert num_pages(prefaulter) == 3 * 2
    prefaulter.on_plan(plan([], [BLOCKS_PER_PAGE - 1]), num_groups=1)
    assert num_pages(prefaulter) == 0
    prefaulter.on_plan(plan([BLOCKS_PER_PAGE], []), num_groups=1)
    assert num_pages(prefaulter) == 3
    prefaulter.on_plan(plan([1], []), num_groups=1)
    assert num_pages(prefaulter) == 0


def test_more_pages_are_kept_ready_where_there_is_memory_for_them_and_the_nearest_come_first() -> None:
    prefaulter = Prefaulter(buffers(2), NUM_BLOCKS, reserve_bytes=2 * 2 * HUGE_PAGE_BYTES)
    prefaulter.on_plan(plan([0], []), num_groups=1)
    assert list(prefaulter._queue) == [(index, page * HUGE_PAGE_BYTES) for page in range(3) for index in range(2)]
    assert num_pages(prefaulter) == 2 * 3


def test_the_part_of_a_page_at_the_beginning_of_a_buffer_is_touched_too() -> None:
    quarter = HUGE_PAGE_BYTES // 4
    memory = [*buffers(1, page_offset=quarter), *buffers(1, page_offset=3 * quarter)]
    prefaulter = Prefaulter(memory, NUM_BLOCKS, reserve_bytes=0)
    prefaulter.on_plan(plan([0], []), num_groups=1)
    assert list(prefaulter._queue) == [(1, -3 * quarter), (0, -quarter), (1, quarter), (0, 3 * quarter)]
    prefaulter.on_plan(plan([NUM_BLOCKS - 1], []), num_groups=1)
    assert num_pages(prefaulter) == 2 * (NUM_PAGES + 1)
    assert all(bool((buffer == 7).all()) for buffer in memory)


def test_slots_of_states_are_no_blocks() -> None:
    prefaulter = Prefaulter(buffers(1), NUM_BLOCKS, reserve_bytes=0)
    request = Admitted(0, "r", pack_ids([1]), 1, [[0], [NUM_BLOCKS - 1]], SamplingSpec(max_tokens=1, seed=0))
    prefaulter.on_plan(StepPlan(0, [], [request], [Appended(0, [[], [NUM_BLOCKS - 1]])], []), num_groups=1)
    assert num_pages(prefaulter) == 2


def test_there_is_an_end() -> None:
    prefaulter = Prefaulter(buffers(1), NUM_BLOCKS)
    prefaulter.on_plan(plan([NUM_BLOCKS - 1], []), num_groups=1)
    assert num_pages(prefaulter) == NUM_BLOCKS // BLOCKS_PER_PAGE


def test_contents_stay() -> None:
    memory = buffers(2)
    prefaulter = Prefaulter(memory, NUM_BLOCKS)
    prefaulter.on_plan(plan([NUM_BLOCKS - 1], []), num_groups=1)
    num_pages(prefaulter)
    assert all(bool((buffer == 7).all()) for buffer in memory)


def test_without_buffers_there_is_nothing_to_do() -> None:
    prefaulter = Prefaulter((), NUM_BLOCKS)
    prefaulter.on_plan(plan([5], []), num_groups=1)
    assert not prefaulter.has_pages


def test_all_are_taken_after_one_wait_unless_a_command_comes() -> None:
    prefaulter = Prefaulter(buffers(3), NUM_BLOCKS, reserve_bytes=0)
    prefaulter.on_plan(plan([0], []), num_groups=1)
    waits: list[int] = []

    def wait_for_command(wait_ms: int) -> bool:
        waits.append(wait_ms)
        return len(waits) == 3

    prefaulter.touch_pages(wait_for_command)
    assert (waits, len(prefaulter._queue)) == ([IDLE_MS, 0, 0], 3 * 2 - 2)
    prefaulter.touch_pages(wait_for_command)
    assert (waits[3:], len(prefaulter._queue)) == ([IDLE_MS, 0, 0, 0], 0)


def test_the_blocks_of_all_groups_count() -> None:
    prefaulter = Prefaulter(buffers(2), NUM_BLOCKS, reserve_bytes=0)
    request = Admitted(0, "r", pack_ids([1]), 1, [[-1, 1], [0, 3]], SamplingSpec(max_tokens=1, seed=0))
    prefaulter.on_plan(StepPlan(0, [], [request], [], []), num_groups=1)
    assert num_pages(prefaulter) == 2 * 2
    prefaulter.on_plan(StepPlan(1, [], [], [Appended(0, [[BLOCKS_PER_PAGE], [2]])], []), num_groups=1)
    assert num_pages(prefaulter) == 2
