"""Memory that is taken ahead of use: which pages, in which order, and that nothing in them changes."""

import pytest
import torch

from octavo.kernels.native.memory import HUGE_PAGE_BYTES
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Appended, StepPlan
from octavo.worker_proc.cache.pages import IDLE_MS, PagesAhead

NUM_BLOCKS = 64
BLOCKS_PER_PAGE = 16


def buffers(num: int) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [
            torch.full((NUM_BLOCKS // BLOCKS_PER_PAGE * HUGE_PAGE_BYTES,), 7, dtype=torch.uint8) for _ in range(num)
        ]


def plan(admitted: list[int], appended: list[int]) -> StepPlan:
    request = Admitted(0, "r", [1], 1, admitted, SamplingSpec(max_tokens=1, seed=0))
    return StepPlan(0, [], [request], [Appended(0, appended)], [])


def num_pages(pages: PagesAhead) -> int:
    count = 0
    while pages.has_wanted:
        pages.take_page()
        count += 1
    return count


def test_nothing_is_taken_before_the_first_use() -> None:
    assert not PagesAhead(buffers(2), NUM_BLOCKS).has_wanted


@pytest.mark.parametrize("is_admitted", [True, False])
def test_the_page_in_use_and_the_next_are_taken_once_in_every_buffer(is_admitted: bool) -> None:
    pages = PagesAhead(buffers(3), NUM_BLOCKS, ahead_bytes=0)
    pages.note(plan([2, 0], []) if is_admitted else plan([], [0, 2]))
    assert num_pages(pages) == 3 * 2
    pages.note(plan([], [BLOCKS_PER_PAGE - 1]))
    assert num_pages(pages) == 0
    pages.note(plan([BLOCKS_PER_PAGE], []))
    assert num_pages(pages) == 3
    pages.note(plan([1], []))
    assert num_pages(pages) == 0


def test_more_pages_are_kept_ready_where_there_is_memory_for_them_and_the_nearest_come_first() -> None:
    pages = PagesAhead(buffers(2), NUM_BLOCKS, ahead_bytes=2 * 2 * HUGE_PAGE_BYTES)
    pages.note(plan([0], []))
    assert list(pages._wanted) == [(index, page * HUGE_PAGE_BYTES) for page in range(3) for index in range(2)]
    assert num_pages(pages) == 2 * 3


def test_there_is_an_end() -> None:
    pages = PagesAhead(buffers(1), NUM_BLOCKS)
    pages.note(plan([NUM_BLOCKS - 1], []))
    assert num_pages(pages) == NUM_BLOCKS // BLOCKS_PER_PAGE


def test_contents_stay() -> None:
    memory = buffers(2)
    pages = PagesAhead(memory, NUM_BLOCKS)
    pages.note(plan([NUM_BLOCKS - 1], []))
    num_pages(pages)
    assert all(bool((buffer == 7).all()) for buffer in memory)


def test_without_buffers_there_is_nothing_to_do() -> None:
    pages = PagesAhead([], NUM_BLOCKS)
    pages.note(plan([5], []))
    assert not pages.has_wanted


def test_all_are_taken_after_one_wait_unless_a_command_comes() -> None:
    pages = PagesAhead(buffers(3), NUM_BLOCKS, ahead_bytes=0)
    pages.note(plan([0], []))
    waits: list[int] = []

    def comes_within(wait_ms: int) -> bool:
        waits.append(wait_ms)
        return len(waits) == 3

    pages.take_pages(comes_within)
    assert (waits, len(pages._wanted)) == ([IDLE_MS, 0, 0], 3 * 2 - 2)
    pages.take_pages(comes_within)
    assert (waits[3:], len(pages._wanted)) == ([IDLE_MS, 0, 0, 0], 0)
