"""Steps on a device, as far as it takes none: sizes, packing, the memory of slots, and how steps are filled up."""

import math
import select
import threading
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_stream import FakeStream
from hypothesis import given
from hypothesis import strategies as st
from worker_plans import spec

from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import LibraryLinear, PaddedLinear
from octavo.kernels.linear.gpu_tiles import H100, Tiling
from octavo.kernels.paged_attention.gpu_prefixes import SegmentLabels
from octavo.kernels.sample import RequestTable, SamplingWidths
from octavo.kernels.sample.table import LISTS
from octavo.kernels.slot_rows import PADDING
from octavo.kernels.token_mask import pack_mask
from octavo.worker_proc.batch.inputs import PENDING, GroupInputs, StateInputs, StepInputs
from octavo.worker_proc.executor.in_flight import EventWatcher
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.runners.cuda_graphs.metadata import (
    NO_SLOT,
    SampleRows,
    StepSize,
    fill_inputs,
    fill_samples,
    state_slots,
)
from octavo.worker_proc.runners.cuda_graphs.packed import Field, PackedLayout
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphSizes, idle_sizes
from octavo.worker_proc.runners.cuda_graphs.slot_memory import Column, SlotMemory
from octavo.worker_proc.runners.cuda_graphs.slot_table import SlotTable, Widths
from octavo.worker_proc.runners.cuda_graphs.step_buffer import MAX_PACKED_CHANGES, StepBuffer
from octavo.worker_proc.sampling.state import SamplingState

CPU = torch.device("cpu")


def test_sizes_are_close_for_few_requests_and_the_largest_is_one() -> None:
    def decodes(largest: int, padded: dict[int, int] | None = None) -> tuple[int, ...]:
        return GraphSizes.of(largest, 64, lambda size: (padded or {}).get(size, size)).decodes.largest_first

    assert decodes(20) == (20, 16, 8, 4, 2, 1)
    assert decodes(3) == (3, 2, 1)
    assert decodes(512)[::-1] == (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    assert decodes(0) == ()
    # Products would pad 1 to 2 and 16 to 24.
    assert decodes(20, {1: 2, 16: 24}) == (20, 8, 4, 2)


def test_sizes_of_prompts_lie_apart_by_a_fifth_and_within_the_budget_of_a_step() -> None:
    def prompts(budget: int, padded: dict[int, int] | None = None) -> tuple[int, ...]:
        return GraphSizes.of(1, budget, lambda size: (padded or {}).get(size, size)).prompts.largest_first

    assert prompts(8192)[::-1] == (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))
    assert prompts(300)[::-1] == (64, 128, 192, 256, 300)
    assert prompts(24) == (24,)
    # Products would pad 300 to 304: steps that long have no graph.
    assert prompts(300, {64: 128, 300: 304})[::-1] == (128, 192, 256)
    assert GraphSizes.of(0, 8192).prompts.largest_first == ()


def test_graphs_have_sizes_that_no_weight_pads() -> None:
    parameters = Parameters(Placement(torch.float32), prefixes=[])
    assert parameters.unpadded_rows(3) == 3
    for name, counts in {"a": (2, 4, 8, 16), "b": (1, 2, 3, 5, 8, 16), "c": None}.items():
        linear = LibraryLinear(torch.zeros(1, 1), None)
        product = linear if counts is None else PaddedLinear(linear, counts)
        parameters.linear(name, {name: 1}, 1, bias=False).packed = PackedLinear(1, 1, torch.float32, CPU, product)
    assert [parameters.unpadded_rows(num_rows) for num_rows in (1, 2, 3, 5, 16, 17)] == [2, 2, 8, 8, 16, 17]


@pytest.mark.parametrize("budget", [50, 100, 2048, 8192])
def test_every_variant_of_our_products_is_launched_before_the_first_step(budget: int) -> None:
    sizes = idle_sizes(StepSize(budget, 60, 60))
    assert sizes[0] == StepSize(budget, min(budget, 60), min(budget, 60))
    # Of Qwen3-0.6B and Llama-3.1-8B: with and without splits, and with tiles that become wide.
    for num_outputs, num_inputs in ((1024, 2048), (4096, 1024), (28672, 4096), (4096, 14336), (151936, 1024)):
        tiling = Tiling(num_outputs, num_inputs, 2, H100)

        def variants(rows: Iterable[int], tiling: Tiling = tiling) -> set[object]:
            return {(launch.tile, launch.is_spread) for launch in map(tiling.launch, rows)}

        assert variants(range(1, budget + 1)) == variants(size.num_tokens for size in sizes)


@given(st.integers(1, 700), st.integers(1, 700))
def test_a_step_takes_the_smallest_graph_that_holds_it(largest: int, num_requests: int) -> None:
    sizes = GraphSizes.of(largest, 64).decodes
    fit = sizes.fit(num_requests)
    assert sorted(set(sizes.largest_first), reverse=True) == list(sizes.largest_first)
    assert sizes.from_size(num_requests) == tuple(size for size in sizes.largest_first[::-1] if size >= num_requests)
    assert fit == min(sizes.from_size(num_requests), default=None)


@given(st.lists(st.tuples(st.sampled_from([torch.int32, torch.int64, torch.float64]), st.integers(0, 9)), max_size=6))
def test_packed_arrays_do_not_touch_one_another(fields: list[tuple[torch.dtype, int]]) -> None:
    layout = PackedLayout([Field(str(index), dtype, count) for index, (dtype, count) in enumerate(fields)])
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for index, array in enumerate(layout.host_views(buffer).values()):
        array[:] = index + 1
    for index, (view, (dtype, count)) in enumerate(zip(layout.views(buffer).values(), fields, strict=True)):
        assert (view.dtype, view.tolist()) == (dtype, [index + 1] * count)
        assert (view.data_ptr() - buffer.data_ptr()) % 16 == 0 or not count


def test_changes_of_slots_arrive_and_nothing_else_does() -> None:
    columns = [Column("number", torch.float64), Column("list", torch.int32, 3), Column("last", torch.int64)]
    memory = SlotMemory(columns, 4, CPU)
    assert [len(part) for part in memory.take_changes()] == [0, 0]
    memory.write("number", 2, [0.1])
    memory.write("list", 1, [5, 6], start=1)
    memory.write("list", 3, [1, 1, 1])
    memory.write("list", 3, [7, 8])
    memory.write("last", 0, [-(2**63)])
    places, words = memory.take_changes()
    memory.apply(torch.from_numpy(places), torch.from_numpy(words))
    assert memory.tensor("number").tolist() == [0, 0, 0.1, 0]
    assert memory.tensor("list").tolist() == [[0, 0, 0], [0, 5, 6], [0, 0, 0], [7, 8, 0]]
    assert memory.tensor("last").tolist() == [-(2**63), 0, 0, 0]


def sent(table: SlotTable) -> SlotTable:
    """Send what waits to be."""
    for memory in table.memories:
        StepBuffer(FakeStream(), StepSize(1, 1, 1), 1).send_changes(memory)
    return table


def table_of(num_slots: int = 3) -> SlotTable:
    widths = Widths(SamplingWidths(seen=20, mask_words=3), max_seen=20, blocks=4)
    return SlotTable(num_slots, widths, CPU, [SegmentLabels(num_slots, 4, 16, 32)])


def test_a_slot_says_what_its_request_asks_for_and_the_next_one_nothing_of_it() -> None:
    table = table_of()
    asking = spec(
        temperature=0.5, seed=2**64 - 1, top_k=3, top_p=0.5, min_p=0.25, logit_bias=((4, 1.5),), min_tokens=2,
        eos_token_ids=(9,), bad_words=((1,), (2, 3)), frequency_penalty=0.5, allowed_token_ids=(0, 33),
    )  # fmt: skip
    table.admit(1, SamplingState.prepare(asking, [5, 6, 5], [6], 70), [[8, 9]])
    requests = sent(table).requests
    assert (requests.temperature_S[1], requests.seed_S[1], requests.top_k_S[1], requests.top_p_S[1]) == (
        0.5,
        -1,
        3,
        0.5,
    )
    assert requests.log_min_p_S[1] == np.float32(math.log(0.25))
    assert (requests.num_biases_S[1], requests.bias_ids_SB[1, 0], requests.bias_values_SB[1, 0]) == (1, 4, 1.5)
    assert (requests.num_withheld_S[1], requests.withheld_ids_SE[1, 0], requests.min_tokens_S[1]) == (1, 9, 2)
    assert (requests.num_bad_S[1], requests.bad_ids_SX[1, 0]) == (1, 1)
    assert requests.seen_ids_SL[1, :2].tolist() == [5, 6]
    assert requests.output_counts_SL[1, :2].tolist() == [0, 1]
    assert (requests.has_penalties_S[1], requests.penalties_S3[1].tolist()) == (1, [1.0, 0.5, 0.0])
    assert (requests.has_mask_S[1], requests.allowed_SW[1].tolist()) == (1, [1, 2, 0])
    assert table.block_ids[0][1].tolist() == [8, 9, 0, 0]
    table.admit(1, SamplingState.prepare(spec(), [5], [], 70), [[7]])
    sent(table)
    for name in ("num_biases_S", "num_withheld_S", "num_bad_S", "has_penalties_S", "has_mask_S", "top_k_S"):
        assert getattr(requests, name)[1] == 0
    assert (requests.temperature_S[1], requests.top_p_S[1], requests.log_min_p_S[1]) == (0.0, 1.0, -math.inf)


def test_unchanged_values_of_a_slot_are_not_sent_again() -> None:
    table = table_of()
    state = SamplingState.prepare(spec(temperature=0.5, seed=3), [5], [], 70)
    table.admit(0, state, [[]])
    assert [len(memory.take_changes()[0]) for memory in sent(table).memories] == [0, 0]
    table.admit(0, state, [[]])
    assert [len(memory.take_changes()[0]) for memory in table.memories] == [0, 0]


def test_a_table_grows_for_long_lists_and_forgets_nothing() -> None:
    table = table_of()
    table.admit(0, SamplingState.prepare(spec(temperature=0.5, logit_bias=((3, 2.0),)), [5], [], 70), [[6]])
    sent(table)
    long = SamplingState.prepare(spec(logit_bias=tuple((token_id, 1.0) for token_id in range(70))), [5], [], 70)
    widths = table.widths.holding(long)
    assert widths.sampling.biases >= 70
    before = table.requests
    table.grow(widths.sampling)
    table.admit(1, long, [[]])
    requests = sent(table).requests
    assert (requests.temperature_S[0], requests.bias_ids_SB[0, 0], table.block_ids[0][0, 0]) == (0.5, 3, 6)
    assert requests.bias_ids_SB[1, :70].tolist() == list(range(70))
    for name in RequestTable.__slots__:
        is_same = getattr(requests, name).data_ptr() == getattr(before, name).data_ptr()
        assert is_same == (name not in LISTS), "captured graphs read it where it was"
    expected = [(getattr(requests, name).data_ptr(), getattr(requests, name).shape[1]) for name in LISTS]
    assert requests.lists_L2.tolist() == [list(pair) for pair in expected]


def test_the_lists_of_penalties_take_no_memory_until_a_request_has_penalties() -> None:
    vocab_size, max_model_len, num_slots = 128_000, 8192, 64
    widths = Widths(SamplingWidths(mask_words=vocab_size // 32), max_seen=max_model_len + 1, blocks=512)
    table = SlotTable(num_slots, widths, CPU, [SegmentLabels(num_slots, 512, 16, 256)])
    full_bytes = 2 * 4 * widths.max_seen * (num_slots + 1)
    plain = SamplingState.prepare(spec(temperature=0.5), [5], [], vocab_size)
    assert table.widths.holding(plain) == widths
    penalized = SamplingState.prepare(spec(max_tokens=1500, frequency_penalty=1.0), [5, 6], [5], vocab_size)
    num_bytes = table.num_bytes
    table.grow(table.widths.holding(penalized).sampling)
    assert table.num_bytes - num_bytes == 2 * 4 * 2048 * (num_slots + 1) < full_bytes / 4
    table.admit(3, penalized, [[]])
    assert sent(table).requests.seen_ids_SL[3, :2].tolist() == [5, 6]
    endless = SamplingState.prepare(spec(max_tokens=10**6, frequency_penalty=1.0), [5, 6], [5], vocab_size)
    assert table.widths.holding(endless).sampling.seen == widths.max_seen


def test_masks_go_to_the_device_as_whole_rows_in_one_copy() -> None:
    vocab_size, stream = 128_000, FakeStream()
    num_words = vocab_size // 32
    table = SlotTable(4, Widths(SamplingWidths(mask_words=num_words), max_seen=0), CPU, [])
    buffer = StepBuffer(stream, StepSize(1, 1, 1), 1)
    masks = {slot: pack_mask((slot, vocab_size - 1), vocab_size) for slot in (3, 1)}
    for slot, allowed_W in masks.items():
        table.set_mask(slot, allowed_W)
    buffer.send_changes(table.memories[1])
    rows_bytes, flags_bytes = 2 * (8 + 4 * num_words), 2 * (8 + 4)
    assert stream.num_uploads == 2
    assert stream.uploaded_bytes <= rows_bytes + flags_bytes + 32, "a word is not sent with a place of its own"
    for slot, allowed_W in masks.items():
        assert torch.equal(table.requests.allowed_SW[slot], allowed_W)
    assert table.requests.has_mask_S.tolist() == [0, 1, 0, 1, 0]


def decode_of_two() -> tuple[StepInputs, SampleRows]:
    inputs = StepInputs(
        token_ids_T=np.array([11, PENDING]),
        positions_T=np.array([4, 7]),
        query_starts=np.array([0, 1, 2]),
        context_lens=np.array([5, 8]),
        slots_T=np.array([2, 0]),
        groups=(GroupInputs(np.array([20, 30]), None),),
    )
    return inputs, SampleRows(np.array([0, 1]), np.array([2, 0]), np.array([5, 8]), np.array([1, 2]))


def test_a_step_is_filled_up_with_rows_that_do_no_harm() -> None:
    buffer = StepBuffer(FakeStream(), StepSize(8, 4, 4), num_attention_words=0)
    inputs, samples = buffer.inputs(4, 3), buffer.samples(4)
    for fields in (inputs, samples):
        for array in buffer.arrays(fields).values():
            array[:] = 0x5A
    fill_inputs(buffer.arrays(inputs), decode_of_two()[0], idle_slot=3)
    fill_samples(buffer.arrays(samples), decode_of_two()[1], idle_slot=3)
    views = {name: array.tolist() for fields in (inputs, samples) for name, array in buffer.arrays(fields).items()}
    assert views == {
        "token_ids": [11, PENDING, PADDING, PADDING],
        "token_slots": [2, 0, 3, 3],
        "positions": [4, 7, 0, 0],
        "slot_mapping_0": [20, 30, NO_SLOT, NO_SLOT],
        "sample_rows": [0, 1, 0, 0],
        "sample_slots": [2, 0, 3, 3],
        "sample_positions": [5, 8, 0, 0],
        "num_outputs": [1, 2, 0, 0],
        "request_slots": [2, 0, 3],
    }


def test_padding_reads_and_writes_no_state() -> None:
    buffer = StepBuffer(FakeStream(), StepSize(8, 4, 4), num_attention_words=0, has_states=True)
    inputs = buffer.inputs(6, 4)
    states = StateInputs(np.array([-1, 7], np.int32), np.array([5, 7], np.int32))
    step = replace(decode_of_two()[0], query_starts=np.array([0, 1, 2]), states=states)
    fill_inputs(buffer.arrays(inputs), step, idle_slot=3)
    slots = {
        name: buffer.arrays(inputs)[name].tolist() for name in ("query_starts", "state_sources", "state_destinations")
    }
    assert slots == {
        "query_starts": [0, 1, 2, 2, 2],
        "state_sources": [-1, 7, -1, -1],
        "state_destinations": [5, 7, -1, -1],
    }
    assert state_slots(inputs.views) is not None
    assert state_slots(buffer.samples(1).views) is None


def test_one_copy_takes_a_step_its_plan_and_its_changes() -> None:
    stream = FakeStream()
    memory = SlotMemory([Column("number", torch.int32, 2)], 3, CPU)
    buffer = StepBuffer(stream, StepSize(8, 4, 4), num_attention_words=6)
    inputs, samples = buffer.inputs(2, 2), buffer.samples(2)
    buffer.advance()
    fill_inputs(buffer.arrays(inputs), decode_of_two()[0], idle_slot=2)
    fill_samples(buffer.arrays(samples), decode_of_two()[1], idle_slot=2)
    buffer.attention_plan()[:] = range(6)
    memory.write("number", 1, [4, 5])
    buffer.send(inputs, 4, memory)
    assert stream.num_uploads == 1
    assert inputs.views["positions"].tolist() == [4, 7]
    assert samples.views["sample_positions"].tolist() == [5, 8]
    assert buffer.attention_plan_W.tolist() == [0, 1, 2, 3, 0, 0]
    assert memory.tensor("number").tolist() == [[0, 0], [4, 5], [0, 0]]


def test_samples_have_their_place_whatever_the_inputs() -> None:
    """A graph that samples reads the same memory in steps of all sizes, and so does one that computes."""
    buffer = StepBuffer(FakeStream(), StepSize(8, 4, 4), num_attention_words=6, num_groups=2)
    ends = [view.data_ptr() + view.nbytes for view in buffer.inputs(3, 2).views.values()]
    first = min(view.data_ptr() for view in buffer.samples(4).views.values())
    assert max(ends) <= first == min(view.data_ptr() for view in buffer.samples(1).views.values())
    last = max(view.data_ptr() + view.nbytes for view in buffer.samples(4).views.values())
    assert last <= buffer.attention_plan_W.data_ptr()


def test_more_changes_than_a_step_has_room_for_go_alone() -> None:
    stream, width = FakeStream(), MAX_PACKED_CHANGES + 1
    memory = SlotMemory([Column("list", torch.int32, width)], 1, CPU)
    buffer = StepBuffer(stream, StepSize(1, 1, 1), num_attention_words=1)
    inputs = buffer.inputs(1, 1)
    buffer.advance()
    memory.write("list", 0, range(width))
    buffer.send(inputs, 1, memory)
    assert stream.num_uploads == 2
    assert memory.tensor("list")[0].tolist() == list(range(width))


def test_a_host_buffer_that_is_written_too_early_is_found() -> None:
    """Two steps may be in flight: the third needs the first one's buffer."""
    stream = FakeStream()
    memory = SlotMemory([Column("number", torch.int32)], 1, CPU)
    buffer = StepBuffer(stream, StepSize(1, 1, 1), num_attention_words=1)
    inputs = buffer.inputs(1, 1)
    for value in range(3):
        buffer.advance()
        buffer.arrays(inputs)["token_ids"][:] = value + 1
        buffer.send(inputs, 1, memory)
    with pytest.raises(AssertionError, match="before the device had read it"):
        stream.catch_up()


def test_a_mark_wakes_who_polls() -> None:
    others = set(threading.enumerate())
    stream, watch = FakeStream(), EventWatcher()
    event = stream.record_event()
    watch.add(event)
    poll = select.poll()
    poll.register(watch.fileno())
    assert not poll.poll(20)
    event.wait()
    assert poll.poll(5000)
    watch.acknowledge()
    assert not poll.poll(0)
    watch.close()
    assert set(threading.enumerate()) <= others, "the thread has ended"
