"""top_k: cpu and native against the reference, with many ties."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.top_k import cases, native, reference, top_k


@pytest.mark.parametrize(("num_values", "k"), cases.CASES)
def test_cpu_equals_reference(num_values: int, k: int) -> None:
    values = cases.row(num_values)
    assert torch.equal(top_k(values, k), reference.top_k(values, k))


@pytest.mark.parametrize(("num_values", "k"), cases.CASES)
def test_native_equals_reference(native_library: NativeLibrary, num_values: int, k: int) -> None:
    values = cases.row(num_values)
    assert torch.equal(native.top_k(native_library, values, k), reference.top_k(values, k))


@settings(max_examples=examples(40, 100), deadline=None)
@given(data=st.data(), num_values=st.integers(1, 600))
def test_native_selects_from_any_numbers(native_library: NativeLibrary, data, num_values: int) -> None:
    """Of all magnitudes and signs, with infinities and both zeros, many of them equal."""
    drawn = data.draw(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9))
    some = [*drawn, 0.0, -0.0, math.inf, -math.inf]
    indices = torch.randint(0, len(some), (num_values,), generator=torch.Generator().manual_seed(num_values))
    values = torch.tensor(some)[indices]
    k = data.draw(st.integers(1, num_values))
    assert torch.equal(native.top_k(native_library, values, k), reference.top_k(values, k))


def test_equal_values_come_by_rising_index() -> None:
    assert top_k(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 4).tolist() == [1, 2, 4, 3]
    assert top_k(torch.zeros(1000), 3).tolist() == [0, 1, 2]


def test_rows_that_are_views_of_a_batch() -> None:
    batch = torch.stack([cases.row(151, seed) for seed in range(4)])
    for row in range(4):
        assert torch.equal(top_k(batch[row], 9), top_k(batch[row].clone(), 9))
