"""Penalties: cpu and native against reference."""

import pytest
import torch

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.penalties import apply_penalties, cases, native, reference


def expected_of(case: cases.Case) -> torch.Tensor:
    logits = case.logits_V.clone()
    reference.apply_penalties(logits, case.seen_ids_S, case.output_counts_S, **case.penalties)
    return logits


@pytest.mark.parametrize("shape", cases.SHAPES)
def test_cpu_equals_reference(shape: tuple[int, int]) -> None:
    case = cases.case(*shape)
    logits = case.logits_V.clone()
    apply_penalties(logits, case.seen_ids_S, case.output_counts_S, **case.penalties)
    assert torch.equal(logits, expected_of(case))


@pytest.mark.parametrize("shape", cases.SHAPES)
def test_native_equals_reference(native_library: NativeLibrary, shape: tuple[int, int]) -> None:
    for seed in range(5):
        case = cases.case(*shape, seed)
        logits = case.logits_V.clone()
        native.apply_penalties(native_library, logits, case.seen_ids_S, case.output_counts_S, **case.penalties)
        assert torch.equal(logits, expected_of(case))


def test_each_penalty_by_hand() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 1.0])
    apply_penalties(
        logits,
        torch.tensor([0, 2, 1], dtype=torch.int32),
        torch.tensor([0, 3, 0], dtype=torch.int32),
        repetition=2.0,
        frequency=0.25,
        presence=0.5,
    )
    assert logits.tolist() == [1.0, -4.0, 0.5 - 0.75 - 0.5, 1.0]
