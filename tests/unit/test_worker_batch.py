"""The persistent batch: plans as tensors, and invalid plans."""

from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Appended, Scheduled, StepPlan
from octavo.worker_proc.batch.state import FEW, BatchState

SPEC = SamplingSpec(max_tokens=10, seed=0)


def state() -> BatchState:
    return BatchState(num_slots=2, max_model_len=32, block_size=4, vocab_size=100)


def admitted(slot: int, token_ids: list[int], block_ids: list[int], sampling: SamplingSpec = SPEC) -> Admitted:
    return Admitted(slot, f"r{slot}", pack_ids(token_ids), len(token_ids), [block_ids], sampling)


def changes(
    released: tuple[int, ...] = (),
    new: tuple[Admitted, ...] = (),
    appended: tuple[Appended, ...] = (),
    scheduled: tuple[Scheduled, ...] = (),
    **more: Any,
) -> StepPlan:
    return StepPlan(0, list(released), list(new), list(appended), list(scheduled), **more)


def test_a_ragged_step_becomes_flat_tensors() -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [10, 11, 12, 13, 14, 15], [7, 3]), admitted(1, [20, 21, 22], [5]))))
    inputs = batch.inputs_of([Scheduled(1, 2, 1, 1), Scheduled(0, 1, 4, 0)])
    assert inputs.token_ids_T.tolist() == [22, 11, 12, 13, 14]
    assert inputs.positions_T.tolist() == [2, 1, 2, 3, 4]
    assert inputs.query_starts.tolist() == [0, 1, 5]
    assert inputs.context_lens.tolist() == [3, 5]
    assert inputs.groups[0].block_table_RP.tolist() == [[5, 0], [7, 3]]
    assert inputs.groups[0].slot_mapping_T.tolist() == [5 * 4 + 2, 7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 3 * 4 + 0]


def test_a_sampled_token_is_where_the_next_step_looks() -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [10, 11, 12, 13], [7]),)))
    batch.record(batch.rows[0], 4, 99)
    batch.apply(changes(appended=(Appended(0, [[2]]),)))
    inputs = batch.inputs_of([Scheduled(0, 4, 1, 1)])
    assert inputs.token_ids_T.tolist() == [99]
    assert inputs.groups[0].slot_mapping_T.tolist() == [8]
    assert batch.token_ids(batch.rows[0], 3, 5) == [13, 99]


def test_a_slot_is_released_before_it_is_given_away_again() -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [1, 2, 3, 4, 5], [7, 8]),)))
    batch.apply(changes(released=(0,), new=(admitted(0, [6], [9]),)))
    inputs = batch.inputs_of([Scheduled(0, 0, 1, 1)])
    assert (inputs.token_ids_T.tolist(), inputs.groups[0].block_table_RP.tolist()) == ([6], [[9]])


def test_each_cache_group_has_blocks_of_its_own() -> None:
    batch = BatchState(num_slots=2, max_model_len=32, block_size=4, vocab_size=100, num_groups=2)
    request = Admitted(0, "r", pack_ids(range(10)), 10, [[7, 3], [2, 5]], SPEC)
    batch.apply(changes(new=(request,)))
    groups = batch.inputs_of([Scheduled(0, 3, 2, 0)]).groups
    assert [group.block_table_RP.tolist() for group in groups] == [[[7, 3]], [[2, 5]]]
    assert [group.slot_mapping_T.tolist() for group in groups] == [[31, 12], [11, 20]]
    batch.apply(changes(appended=(Appended(0, [[], [9]]),)))
    with pytest.raises(ProtocolError, match="position 8 has no block"):
        batch.inputs_of([Scheduled(0, 3, 6, 0)])
    with pytest.raises(ProtocolError, match="blocks of 1 cache groups came for a model of 2"):
        batch.apply(changes(appended=(Appended(0, [[1]]),)))


def test_block_tables_are_not_gathered_for_a_device_that_has_its_own() -> None:
    batch = BatchState(num_slots=2, max_model_len=32, block_size=4, vocab_size=100, has_block_tables=False)
    batch.apply(changes(new=(admitted(0, [1, 2, 3, 4, 5, 6], [7, 3]),)))
    (group,) = batch.inputs_of([Scheduled(0, 3, 2, 0)]).groups
    assert group.block_table_RP is None
    assert group.slot_mapping_T.tolist() == [31, 12]


def test_more_slots_than_expected_make_the_tables_grow() -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [1], [7]), admitted(9, [2], [8]))))
    inputs = batch.inputs_of([Scheduled(0, 0, 1, 1), Scheduled(9, 0, 1, 1)])
    assert inputs.token_ids_T.tolist() == [1, 2]
    assert inputs.groups[0].slot_mapping_T.tolist() == [28, 32]


def test_penalty_counts_follow_the_outputs_and_survive_a_preemption() -> None:
    sampling = SamplingSpec(max_tokens=10, seed=0, frequency_penalty=1.0)
    batch = state()
    batch.apply(changes(new=(admitted(0, [1, 2], [7], sampling),)))
    for position, token_id in enumerate([5, 6, 5], start=2):
        batch.record(batch.rows[0], position, token_id)
    before = batch.rows[0].sampling.penalties
    batch.apply(changes(released=(0,), new=(Admitted(0, "r0", pack_ids([1, 2, 5, 6, 5]), 2, [[7, 8]], sampling),)))
    after = batch.rows[0].sampling.penalties
    assert before is not None and after is not None
    for counts in (before, after):
        seen, output_counts = (tensor.tolist() for tensor in counts.tensors())
        assert dict(zip(seen, output_counts, strict=True)) == {1: 0, 2: 0, 5: 2, 6: 1}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (changes(released=(1,)), "slot 1 was released but is empty"),
        (changes(new=(admitted(0, [1], [2]),)), "slot 0 was given to r0 but is taken"),
        (changes(appended=(Appended(1, [[2]]),)), "slot 1, which is empty"),
    ],
)
def test_differences_that_cannot_be(plan: StepPlan, message: str) -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [1, 2, 3], [7]),)))
    with pytest.raises(ProtocolError, match=message):
        batch.apply(plan)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Scheduled(1, 0, 1, 1), "slot 1 was scheduled but is empty"),
        (Scheduled(0, 0, 7, 0), "but 6 tokens are known"),
        (Scheduled(0, 3, 0, 0), "positions 3 to 3"),
        (Scheduled(0, 0, 2, 1), "which is not its last token"),
        (Scheduled(0, 4, 2, 1), "position 5 has no block"),
    ],
)
def test_steps_that_cannot_be(entry: Scheduled, message: str) -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [1, 2, 3, 4, 5, 6], [7]),)))
    with pytest.raises(ProtocolError, match=message):
        batch.inputs_of([entry])
    # Many entries are checked all at once.
    for slot in range(2, 2 * FEW):
        batch.apply(changes(new=(admitted(slot, [1, 2, 3, 4], [slot]),)))
    good = [Scheduled(slot, 1, 3, 1) for slot in range(2, 2 * FEW)]
    with pytest.raises(ProtocolError, match=message):
        batch.inputs_of([*good, entry])
    assert len(batch.inputs_of(good).token_ids_T) == 3 * len(good) > FEW


def test_a_slot_beyond_all_tables_is_not_scheduled_among_many() -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [1, 2], [7]),)))
    with pytest.raises(ProtocolError, match="slot 50 was scheduled but is empty"):
        batch.inputs_of([*[Scheduled(0, 0, 1, 0)] * FEW, Scheduled(50, 0, 1, 1)])


def test_tokens_of_requests_that_have_left_are_dropped() -> None:
    batch = state()
    penalized = SamplingSpec(max_tokens=10, seed=0, presence_penalty=1.0)
    batch.apply(changes(new=(admitted(0, [1, 2], [7], penalized), admitted(1, [3, 4], [8], penalized))))
    slots, positions = np.array([0, 1]), np.array([2, 2])
    admissions = batch.columns.admission_S[slots]
    batch.append_pending(slots, positions)
    batch.apply(changes(released=(0,), new=(admitted(0, [5, 6, 9], [7], penalized),)))
    batch.set_tokens(slots, positions, admissions, np.array([50, 60]))
    assert batch.token_ids(batch.rows[0], 0, 3) == [5, 6, 9]
    assert batch.token_ids(batch.rows[1], 0, 3) == [3, 4, 60]
    counts = [batch.rows[slot].sampling.penalties.seen_ids.tolist()[:3] for slot in (0, 1)]
    assert 50 not in counts[0] and 60 in counts[1]


def test_a_mask_binds_the_next_token_only() -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [1, 2], [7]), admitted(1, [3, 4], [8]))))
    batch.mask([(0, 0, bytes(16))])
    assert batch.rows[0].sampling.has_own_mask and not batch.rows[1].sampling.has_own_mask
    batch.record(batch.rows[1], 2, 5)
    assert batch.rows[0].sampling.has_own_mask
    batch.record(batch.rows[0], 2, 5)
    assert not batch.rows[0].sampling.has_own_mask


def test_a_token_sampled_twice_is_noticed() -> None:
    batch = state()
    batch.apply(changes(new=(admitted(0, [1, 2], [7]),)))
    batch.record(batch.rows[0], 2, 5)
    with pytest.raises(ProtocolError, match="sampled at 2, but 3 are known"):
        batch.record(batch.rows[0], 2, 5)


def test_a_step_reads_the_state_before_its_first_token_and_writes_the_one_after_its_last() -> None:
    batch = BatchState(num_slots=3, max_model_len=32, block_size=4, vocab_size=100, has_states=True)
    new = [
        Admitted(slot, "", pack_ids([1] * 8), 8, [[slot], states], SPEC)
        for slot, states in enumerate([[5], [-1, 2], [6]])
    ]
    batch.apply(changes(new=tuple(new)))
    batch.apply(changes(appended=(Appended(0, [[4], [5]]), Appended(1, [[], []]), Appended(2, [[7], [3]]))))
    # In place, at the end of the same block; from a checkpoint on; and from the start.
    inputs = batch.inputs_of([Scheduled(0, 3, 3, 0), Scheduled(2, 4, 4, 1)])
    assert len(inputs.groups) == 1
    assert (inputs.states.sources_R.tolist(), inputs.states.destinations_R.tolist()) == ([5, 6], [5, 3])
    inputs = batch.inputs_of([Scheduled(2, 0, 3, 0)])
    assert (inputs.states.sources_R.tolist(), inputs.states.destinations_R.tolist()) == ([-1], [6])


def test_the_state_before_drafts_stays_where_it_is_until_the_next_step_starts_from_it() -> None:
    batch = BatchState(num_slots=2, max_model_len=32, block_size=4, vocab_size=100, has_states=True)
    batch.apply(changes(new=(Admitted(0, "", pack_ids([1] * 7), 7, [[3, 4], [-1, 5]], SPEC),)))
    verify = Scheduled(0, 6, 3, 3)
    plan = changes(appended=(Appended(0, [[7], [9]]),), scheduled=(verify,), draft_tokens=[(0, pack_ids([2, 2]))])
    with pytest.raises(ProtocolError, match="would overwrite the state"):
        batch.add_drafts(plan)
    plan = msgspec.structs.replace(plan, state_moves=[(0, 5, 9)])
    batch.apply(plan)
    batch.add_drafts(plan)
    states = batch.inputs_of([verify]).states
    assert (states.sources_R.tolist(), states.destinations_R.tolist()) == ([5], [9])
    # The first draft was right, the second one was not.
    zeros, known = np.array([0, 0]), np.array([7, 8])
    batch.set_tokens(zeros, known, batch.columns.admission_S[zeros], np.array([2, 3]))
    batch.end_drafts(zeros[:1], batch.columns.admission_S[zeros[:1]])
    again = Scheduled(0, 6, 3, 1)
    batch.apply(changes(scheduled=(again,), state_moves=[(0, 5, 9)]))
    states = batch.inputs_of([again]).states
    assert (states.sources_R.tolist(), states.destinations_R.tolist()) == ([5], [9])
    batch.record(batch.rows[0], 9, 4)
    batch.apply(changes())
    states = batch.inputs_of([Scheduled(0, 9, 1, 1)]).states
    assert (states.sources_R.tolist(), states.destinations_R.tolist()) == ([9], [9])
    with pytest.raises(ProtocolError, match="state of slot 1 moves"):
        batch.apply(changes(state_moves=[(1, 5, 9)]))
