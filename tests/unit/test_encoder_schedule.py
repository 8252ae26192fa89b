"""The encoder's part of steps: budget, eviction, chunks that end before an item, and what workers are told."""

import hashlib
from collections.abc import Sequence

import pytest

from octavo.core_proc.encoder_schedule import MAX_STEP_ITEMS, EncoderSchedule
from octavo.core_proc.request import Request
from octavo.protocol.buffers import Buffer
from octavo.protocol.ids import pack_ids
from octavo.protocol.media import MediaItem, MediaTensor, StepMedia, digest_of, media_fault
from octavo.protocol.params import SamplingSpec
from octavo.protocol.prefix_hash import extra_keys_of, hash_block
from octavo.protocol.requests import Submit


def item(name: str, *spans: tuple[int, int], num_bytes: int = 8, grid: Sequence[int] = ()) -> MediaItem:
    tensors = {"pixel_values": MediaTensor("uint8", [num_bytes], Buffer(name.encode().ljust(num_bytes)))}
    return MediaItem(list(spans), digest_of(tensors), tensors, list(grid))


def request(*items: MediaItem, length: int = 100, slot: int = 0) -> Request:
    submit = Submit(f"r{slot}", pack_ids([1] * length), SamplingSpec(max_tokens=1, seed=0), media=list(items))
    made = Request(b"c", submit, slot, 0.0)
    made.slot = slot
    return made


def admit(schedule: EncoderSchedule, one: Request, num_tokens: int) -> int:
    """Plan tokens of a request as the scheduler does; returns how many the step has room for."""
    fits = schedule.admit(one, num_tokens)
    one.num_computed_tokens += fits
    return fits


def step(schedule: EncoderSchedule) -> StepMedia:
    media = schedule.take_step()
    assert media is not None
    return media


def test_chunks_inside_of_an_item_encode_it_once() -> None:
    schedule, image = EncoderSchedule(50, 100), item("a", (10, 30))
    one = request(image)
    assert admit(schedule, one, 5) == 5
    assert schedule.take_step() is None, "no row of it is needed yet"
    assert admit(schedule, one, 15) == 15
    first = step(schedule)
    assert [one.digest for one in first.inputs] == [image.digest]
    assert first.places == [(0, 10, 10, 0, 0)]
    assert admit(schedule, one, 80) == 80
    second = step(schedule)
    assert (second.inputs, second.places, second.digests) == ([], [(0, 20, 20, 0, 10)], [image.digest])
    assert (schedule.num_queries, schedule.num_hits, schedule.num_encoded_tokens) == (2, 1, 30)


def test_spans_with_tokens_between_them_share_one_result() -> None:
    schedule = EncoderSchedule(50, 100)
    assert admit(schedule, request(item("a", (3, 4), (9, 4), (20, 2))), 12) == 12
    assert step(schedule).places == [(0, 3, 4, 0, 0), (0, 9, 3, 0, 4)]


def test_a_chunk_ends_before_an_item_that_does_not_fit_into_the_step() -> None:
    schedule = EncoderSchedule(40, 100)
    one, other = request(item("a", (10, 30)), item("b", (50, 30))), request(item("a", (0, 30)), slot=1)
    assert admit(schedule, one, 90) == 50
    assert admit(schedule, other, 90) == 90, "its item is encoded in this step already"
    assert len(step(schedule).inputs) == 1
    assert admit(schedule, one, 50) == 50
    assert len(step(schedule).inputs) == 1


def test_a_chunk_may_end_inside_of_an_item_whose_first_row_does_not_fit() -> None:
    schedule = EncoderSchedule(40, 40)
    one, other = request(item("b", (0, 30))), request(item("a", (10, 30)), slot=1)
    assert admit(schedule, other, 20) == 20
    step(schedule)
    assert admit(schedule, one, 30) == 30
    evicted = step(schedule)
    assert evicted.evicted == [other.media[0].digest]
    assert admit(schedule, other, 60) == 60
    again = step(schedule)
    assert [one.digest for one in again.inputs] == [other.media[0].digest], "it is encoded again"
    assert again.places == [(1, 20, 20, 0, 10)]


def test_an_item_larger_than_the_budget_is_encoded_alone() -> None:
    schedule = EncoderSchedule(8, 100)
    one = request(item("a", (0, 30)), item("b", (40, 30)))
    assert admit(schedule, one, 100) == 40
    step(schedule)
    assert admit(schedule, one, 60) == 60


def test_results_of_the_step_are_not_evicted() -> None:
    schedule = EncoderSchedule(1000, 60)
    items = [item(name, (30 * place, 30)) for place, name in enumerate("abc")]
    one = request(*items)
    assert admit(schedule, one, 95) == 60
    assert schedule.num_cached_tokens == 60
    step(schedule)
    assert admit(schedule, one, 35) == 35
    assert step(schedule).evicted == [items[0].digest], "the one that was used longest ago"


def test_the_number_of_items_of_a_step_is_limited() -> None:
    schedule = EncoderSchedule(10_000, 10_000)
    one = request(*[item(str(place), (place, 1)) for place in range(MAX_STEP_ITEMS + 3)])
    assert admit(schedule, one, 100) == MAX_STEP_ITEMS


@pytest.mark.parametrize("tells_workers", [True, False])
def test_forgotten_results_are_encoded_again(tells_workers: bool) -> None:
    schedule, image = EncoderSchedule(50, 100), item("a", (0, 30))
    admit(schedule, request(image), 40)
    step(schedule)
    schedule.forget(tells_workers=tells_workers)
    admit(schedule, request(image), 40)
    again = step(schedule)
    assert again.evicted == ([image.digest] if tells_workers else [])
    assert len(again.inputs) == 1


def test_equal_tokens_with_different_images_have_different_hashes() -> None:
    keys = [extra_keys_of(request_submit) for request_submit in map(_submit, "aab")]
    hashes = [hash_block(bytes(32), pack_ids([1] * 16), 0, one) for one in keys]
    assert hashes[0] == hashes[1] != hashes[2]
    assert {hash_block(bytes(32), pack_ids([1] * 16), 16, one) for one in keys} == {
        hash_block(bytes(32), pack_ids([1] * 16), 16, ())
    }, "later blocks differ by their parents"


def _submit(name: str) -> Submit:
    return Submit("r", pack_ids([1] * 40), SamplingSpec(max_tokens=1, seed=0), media=[item(name, (4, 30))])


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([item("a")], "no rows"),
        ([item("a", (3, 0))], "no rows"),
        ([item("a", (0, 5), (4, 2))], "overlap"),
        ([item("a", (0, 5)), item("b", (4, 2))], "overlap"),
        ([item("a", (90, 11))], "outside"),
        ([item("a", (0, 6), grid=[1, 2, 2])], "grid"),
        ([item("a", (0, 2), (3, 2), grid=[1, 2, 2])], "grid"),
        ([item("a", (0, 4), grid=[4])], "grid"),
        ([MediaItem([(0, 1)], hashlib.sha1(b"").digest(), {})], "digests"),
    ],
)
def test_faults_of_media(items: list[MediaItem], message: str) -> None:
    assert message in str(media_fault(items, 100, {"image"}))
    assert "does not read media of kind image" in str(media_fault([item("a", (0, 5))], 100, {"video", "audio"}))
    assert media_fault([item("a", (0, 5)), item("b", (5, 95))], 100, {"image"}) is None


def attended(name: str) -> MediaItem:
    tensors = {"input_features": MediaTensor("uint8", [8], Buffer(name.encode().ljust(8)))}
    return MediaItem([], digest_of(tensors), tensors, attended_rows=40)


def test_what_running_requests_attend_to_is_kept() -> None:
    schedule = EncoderSchedule(50, 100)
    first, same, second, third = (request(attended(name), slot=slot) for slot, name in enumerate("aabc"))
    for one in (first, second, same):
        assert schedule.has_room_to_start(one)
        schedule.start(one)
    assert not schedule.has_room_to_start(third), "two of 40 rows fit"
    assert admit(schedule, first, 10) == admit(schedule, same, 10) == 10
    assert admit(schedule, second, 10) == 0, "the step encodes 50 rows"
    media = step(schedule)
    assert [one.digest for one in media.inputs] == media.digests == [first.media[0].digest]
    assert media.attended == [(0, 0), (1, 0)]
    assert admit(schedule, second, 10) == 10
    assert step(schedule).attended == [(2, 0)]
    schedule.leave(first)
    assert not schedule.has_room_to_start(third), "the other request about this clip goes on"
    schedule.leave(second)
    assert schedule.has_room_to_start(third)
    schedule.start(third)
    assert admit(schedule, third, 10) == 10
    assert step(schedule).evicted == [second.media[0].digest]


def test_faults_of_items_that_are_attended_to() -> None:
    clip, image = attended("a"), item("b", (0, 3))
    assert media_fault([clip], 4, {"image"}, attended_rows=40) is None
    for items, rows in (([], 40), ([clip, clip], 40), ([image], 40), ([clip], 41), ([clip], 0)):
        assert media_fault(items, 10, {"image"}, attended_rows=rows)


def test_the_last_row_of_a_prompt_is_no_decode() -> None:
    """Decodes are planned without the encoder: such a row would be computed as the token in its place."""
    for one in (request(item("a", (90, 10))), request(attended("a"))):
        schedule = EncoderSchedule(50, 100)
        schedule.start(one)
        one.num_computed_tokens = 99
        assert not one.is_ready_to_decode
        assert admit(schedule, one, 1) == 1
        one.num_pending_tokens = 1
        assert one.is_ready_to_decode
