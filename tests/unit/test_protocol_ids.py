"""Packed ids: bounds are checked on many at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protocol.ids import are_below, pack_ids

MIN, MAX = -(2**31), 2**31 - 1


@settings(max_examples=50)
@given(st.lists(st.integers(MIN, MAX) | st.sampled_from([0, 99, 100])), st.sampled_from([1, 100, MAX, 2**31]))
def test_bounds_are_those_of_each_id(ids: list[int], limit: int) -> None:
    assert are_below(pack_ids(ids), limit) == all(0 <= number < limit for number in ids)


@pytest.mark.parametrize("wrong", [MIN, -1, 100, MAX])
@pytest.mark.parametrize("index", [0, 1023, 1024, 2499])
def test_one_invalid_id_is_found_at_any_position(index: int, wrong: int) -> None:
    ids = pack_ids([99] * 2500)
    assert are_below(ids, 100)
    ids[index] = wrong
    assert not are_below(ids, 100)
