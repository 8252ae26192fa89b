"""Penalties: cpu against reference, rows on their own."""

import pytest
import torch

from octavo.kernels.penalties import apply_penalties, cases, reference


def penalized(case: cases.Case, rows: slice = slice(None)) -> torch.Tensor:
    logits = case.logits_RV[rows].clone()
    apply_penalties(
        logits,
        case.output_counts_RV[rows],
        case.is_in_prompt_RV[rows],
        **{name: penalty[rows] for name, penalty in case.penalties.items()},
    )
    return logits


@pytest.mark.parametrize("shape", cases.SHAPES)
def test_cpu_equals_reference(shape: tuple[int, int]) -> None:
    case = cases.case(*shape)
    expected = case.logits_RV.clone()
    reference.apply_penalties(expected, case.output_counts_RV, case.is_in_prompt_RV, **case.penalties)
    assert torch.equal(penalized(case), expected)


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    case = cases.case(5, 151)
    together = penalized(case)
    for row in range(5):
        assert torch.equal(penalized(case, slice(row, row + 1))[0], together[row])
    assert torch.equal(penalized(case, slice(1, 4)), together[1:4])


def test_each_penalty_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]])
    apply_penalties(
        logits,
        torch.tensor([[0, 0, 3, 0]], dtype=torch.int32),
        torch.tensor([[True, True, False, False]]),
        repetition_R=torch.tensor([2.0]),
        frequency_R=torch.tensor([0.25]),
        presence_R=torch.tensor([0.5]),
    )
    assert logits.tolist() == [[1.0, -4.0, 0.5 - 0.75 - 0.5, 1.0]]
