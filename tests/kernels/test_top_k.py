"""top_k: cpu against reference, which is all about ties."""

import pytest
import torch

from octavo.kernels.top_k import cases, reference, top_k


@pytest.mark.parametrize(("num_values", "k"), cases.CASES)
def test_cpu_equals_reference(num_values: int, k: int) -> None:
    values = cases.row(num_values)
    assert torch.equal(top_k(values, k), reference.top_k(values, k))


def test_equal_values_come_by_rising_index() -> None:
    assert top_k(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 4).tolist() == [1, 2, 4, 3]
    assert top_k(torch.zeros(1000), 3).tolist() == [0, 1, 2]


def test_rows_that_are_views_of_a_batch() -> None:
    batch = torch.stack([cases.row(151, seed) for seed in range(4)])
    for row in range(4):
        assert torch.equal(top_k(batch[row], 9), top_k(batch[row].clone(), 9))
