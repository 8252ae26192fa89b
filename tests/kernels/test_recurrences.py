"""`causal_conv1d`, `selective_scan` and `gated_delta_rule`: right, and the same bits in any chunks and batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from kernel_checks import random
from native_checks import same_bits
from recurrent_operations import LENGTHS, Compute, Results, alone, in_batches, native_compute
from torch import Tensor

from octavo.kernels import causal_conv1d, gated_delta_rule, selective_scan
from octavo.kernels.causal_conv1d import cases as conv_cases
from octavo.kernels.causal_conv1d import reference as conv_reference
from octavo.kernels.causal_conv1d.native import CausalConv1dArguments
from octavo.kernels.dispatch import ShapeError
from octavo.kernels.gated_delta_rule import DeltaWeights
from octavo.kernels.gated_delta_rule import cases as delta_cases
from octavo.kernels.gated_delta_rule import reference as delta_reference
from octavo.kernels.gated_delta_rule.native import GatedDeltaRuleArguments
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.recurrence import StateArguments, StateSlots
from octavo.kernels.selective_scan import ScanWeights
from octavo.kernels.selective_scan import cases as scan_cases
from octavo.kernels.selective_scan import reference as scan_reference
from octavo.kernels.selective_scan.native import SelectiveScanArguments


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation with its weights, in all its forms."""

    name: str
    widths: tuple[int, ...]
    """Of the inputs."""
    out_width: int
    dims: tuple[int, ...]
    """Of a state."""
    through_torch: Compute
    arguments: Callable[[Sequence[Matrix], Matrix, StateArguments], Arguments]
    reference: Callable[..., tuple[Tensor, Tensor]]

    def sequence(self, length: int) -> list[Tensor]:
        return [random(length, width, seed=100 * length + index) for index, width in enumerate(self.widths)]


def convolution(case: str) -> Operation:
    channels, width, has_bias, has_silu = conv_cases.CASES[case]
    weight, bias = random(channels, width, seed=1), random(channels, seed=2) if has_bias else None
    weight_WD = weight.t().contiguous()

    def arguments(inputs: Sequence[Matrix], out: Matrix, state: StateArguments) -> Arguments:
        bias_address = None if bias is None else bias.data_ptr()
        return CausalConv1dArguments(inputs[0], out, state, weight_WD.data_ptr(), bias_address, width, has_silu)

    return Operation(
        "causal_conv1d",
        (channels,),
        channels,
        (width - 1, channels),
        lambda inputs, state, slots: causal_conv1d.causal_conv1d(
            inputs[0], weight, bias, state, slots, has_silu=has_silu
        ),
        arguments,
        lambda x: conv_reference.causal_conv1d(x, weight, bias, has_silu=has_silu),
    )


def scan(case: str) -> Operation:
    num_heads, head_dim, state_size, num_groups = scan_cases.CASES[case]
    weights = ScanWeights(random(num_heads, seed=1), random(num_heads, seed=2), random(num_heads, seed=3), 0.01, 2.5)
    a = -weights.a_log_H.exp()
    addresses = [tensor.data_ptr() for tensor in (a, weights.dt_bias_H, weights.skip_H)]
    return Operation(
        "selective_scan",
        (num_heads * head_dim, num_groups * state_size, num_groups * state_size, num_heads),
        num_heads * head_dim,
        (num_heads, state_size, head_dim),
        lambda inputs, state, slots: selective_scan.selective_scan(*inputs, weights, state, slots),
        # `a` must live as long as its address.
        lambda inputs, out, state, a=a: SelectiveScanArguments(
            *inputs, out, state, *addresses, state_size, num_groups, weights.dt_min, weights.dt_max
        ),
        lambda *inputs: scan_reference.selective_scan(*inputs, weights, state_size),
    )


def delta_rule(case: str) -> Operation:
    num_key_heads, num_heads, key_dim, value_dim = delta_cases.CASES[case]
    weights = DeltaWeights(random(num_heads, seed=1), random(num_heads, seed=2))
    a_scale = -weights.a_log_H.exp()
    key_width, value_width = num_key_heads * key_dim, num_heads * value_dim
    return Operation(
        "gated_delta_rule",
        (key_width, key_width, value_width, num_heads, num_heads),
        value_width,
        (num_heads, key_dim, value_dim),
        lambda inputs, state, slots: gated_delta_rule.gated_delta_rule(*inputs, weights, state, slots),
        lambda inputs, out, state: GatedDeltaRuleArguments(
            *inputs, out, state, a_scale.data_ptr(), weights.dt_bias_H.data_ptr(), key_dim
        ),
        lambda *inputs: delta_reference.gated_delta_rule(*inputs, weights, key_dim),
    )


OPERATIONS = [
    *(convolution(case) for case in conv_cases.CASES),
    *(scan(case) for case in scan_cases.CASES),
    *(delta_rule(case) for case in delta_cases.CASES),
]
NAMES = [
    f"{name}-{case}"
    for name, cases in (("conv", conv_cases), ("scan", scan_cases), ("delta", delta_cases))
    for case in cases.CASES
]


def assert_right_and_independent(operation: Operation, computations: Sequence[Compute]) -> None:
    """Each sequence alone is right, and has the same bits in any batch of any of the computations."""
    sequences = [operation.sequence(length) for length in LENGTHS]
    expected: list[Results] = []
    for inputs in sequences:
        expected.append(alone(computations[0], inputs, operation.dims))
        out, state = operation.reference(*inputs)
        torch.testing.assert_close(expected[-1].out.double(), out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(expected[-1].state.double(), state.double(), rtol=2e-5, atol=2e-5)
    for seed, compute in enumerate(computations):
        for ours, other in zip(in_batches(compute, sequences, operation.dims, seed), expected, strict=True):
            assert same_bits(ours.out, other.out) and same_bits(ours.state, other.state)


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_recurrence_through_torch(operation: Operation) -> None:
    assert_right_and_independent(operation, [operation.through_torch] * 2)


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_native_recurrence(native_library: NativeLibrary, operation: Operation) -> None:
    assert_right_and_independent(
        operation,
        [
            native_compute(
                native_library, operation.name, operation.arguments, operation.out_width, num_threads=num_threads
            )
            for num_threads in (1, 2, 3)
        ],
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_native_outputs_in_bfloat16(native_library: NativeLibrary, operation: Operation) -> None:
    inputs = operation.sequence(19)
    wide, narrow = (
        alone(
            native_compute(
                native_library, operation.name, operation.arguments, operation.out_width, num_threads=2, dtype=dtype
            ),
            inputs,
            operation.dims,
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert same_bits(narrow.out, wide.out.bfloat16()) and same_bits(narrow.state, wide.state)


def test_factors_far_from_one(native_library: NativeLibrary) -> None:
    """Steps and decays that underflow or are large: softplus has no overflow, and its small values are exact."""
    operation = scan("odd")
    weights = replace(ScanWeights(torch.zeros(3), torch.zeros(3), torch.zeros(3)))
    inputs = operation.sequence(37)
    inputs[3] = torch.linspace(-60.0, 60.0, 3 * 37).view(37, 3)
    a, zeros = -torch.ones(3), torch.zeros(3)
    state_size, num_groups = operation.dims[1], 3
    compute = native_compute(
        native_library,
        "selective_scan",
        lambda inputs, out, state: SelectiveScanArguments(
            *inputs,
            out,
            state,
            a.data_ptr(),
            zeros.data_ptr(),
            zeros.data_ptr(),
            state_size,
            num_groups,
            0.0,
            float("inf"),
        ),
        operation.out_width,
        num_threads=1,
    )
    ours = alone(compute, inputs, operation.dims)
    out, _ = scan_reference.selective_scan(*inputs, weights, state_size)
    torch.testing.assert_close(ours.out.double(), out, rtol=2e-5, atol=1e-30)


def test_shapes_that_do_not_match_are_rejected() -> None:
    slots = StateSlots([0, 3], [-1], [0])
    with pytest.raises(ShapeError, match="offsets"):
        StateSlots([0, 3], [-1, 0], [0, 1])
    with pytest.raises(ShapeError, match="causal_conv1d"):
        causal_conv1d.causal_conv1d(random(3, 4), random(4, 9), None, random(1, 8, 4), slots, has_silu=True)
    weights = ScanWeights(random(2), random(2), random(2))
    with pytest.raises(ShapeError, match="selective_scan"):
        selective_scan.selective_scan(
            random(3, 8), random(3, 5), random(3, 5), random(3, 2), weights, random(1, 2, 3, 4), slots
        )
    with pytest.raises(ShapeError, match="gated_delta_rule"):
        gated_delta_rule.gated_delta_rule(
            random(3, 6),
            random(3, 6),
            random(3, 8),
            random(3, 2),
            random(3, 2),
            DeltaWeights(random(2), random(2)),
            random(1, 2, 4, 4),
            slots,
        )
