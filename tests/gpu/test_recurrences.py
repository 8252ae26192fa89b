"""Recurrences with a state per request, and the gates around them, on a GPU: right, and the same bits in any chunks."""

from collections.abc import Callable, Sequence

import pytest
import torch
from kernel_checks import assert_close, random
from native_checks import same_bits
from recurrent_operations import Compute, alone, in_batches
from torch import Tensor

from octavo.kernels.causal_conv1d import cases as conv_cases
from octavo.kernels.causal_conv1d import gpu as conv_gpu
from octavo.kernels.causal_conv1d import reference as conv_reference
from octavo.kernels.gated_delta_rule import DeltaWeights
from octavo.kernels.gated_delta_rule import cases as delta_cases
from octavo.kernels.gated_delta_rule import gpu as delta_gpu
from octavo.kernels.gated_delta_rule import reference as delta_reference
from octavo.kernels.gated_rms_norm import cases as norm_cases
from octavo.kernels.gated_rms_norm import gpu as norm_gpu
from octavo.kernels.gated_rms_norm import reference as norm_reference
from octavo.kernels.multiply import cases as product_cases
from octavo.kernels.multiply import gpu as product_gpu
from octavo.kernels.multiply import reference as product_reference
from octavo.kernels.recurrence import DeviceSlots, StateSlots
from octavo.kernels.selective_scan import ScanWeights
from octavo.kernels.selective_scan import cases as scan_cases
from octavo.kernels.selective_scan import gpu as scan_gpu
from octavo.kernels.selective_scan import reference as scan_reference

LENGTHS = (1, 3, 9)
LARGE = {"Mamba-2", "Qwen3-Next"}
"""Shapes that take the interpreter half a minute."""
Launch = Callable[[Sequence[Tensor], Tensor, DeviceSlots], Tensor]


def some(cases: dict[str, object]) -> list[object]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LARGE)) for name in cases]


def on_device(launch: Launch, device: torch.device, num_padding: int = 0) -> Compute:
    """Return the computation through the memory of a GPU, with requests of padding after the others."""

    def compute(inputs: Sequence[Tensor], states: Tensor, slots: StateSlots) -> Tensor:
        rows = [torch.cat((part, part), dim=1).to(device)[:, : part.shape[1]] for part in inputs]
        given = states.to(device)
        padded = DeviceSlots(
            torch.tensor([*slots.query_starts, *[slots.query_starts[-1]] * num_padding]).to(device),
            *(torch.tensor([*part, *[-1] * num_padding]).to(device) for part in (slots.sources, slots.destinations)),
        )
        out = launch(rows, given, padded)
        states.copy_(given)
        return out.cpu()

    return compute


def assert_right_and_independent(
    launch: Launch,
    reference: Callable[..., tuple[Tensor, Tensor]],
    widths: Sequence[int],
    dims: Sequence[int],
    device: torch.device,
    seed: int,
) -> None:
    """Each sequence alone is right, and has the same bits in any batch and chunks, beside padding."""
    sequences = [
        [random(length, width, seed=seed + 100 * length + index) for index, width in enumerate(widths)]
        for length in LENGTHS
    ]
    expected = [alone(on_device(launch, device), inputs, dims) for inputs in sequences]
    for inputs, ours in zip(sequences, expected, strict=True):
        out, state = reference(*inputs)
        torch.testing.assert_close(ours.out.double(), out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(ours.state.double(), state.double(), rtol=2e-5, atol=2e-5)
    for ours, other in zip(in_batches(on_device(launch, device, 2), sequences, dims, seed), expected, strict=True):
        assert same_bits(ours.out, other.out) and same_bits(ours.state, other.state)
    narrow = [part.bfloat16() for part in sequences[-1]]
    wide = alone(on_device(launch, device), [part.float() for part in narrow], dims)
    ours = alone(on_device(launch, device), narrow, dims)
    assert same_bits(ours.out, wide.out.bfloat16()) and same_bits(ours.state, wide.state)


@pytest.mark.parametrize("case", conv_cases.CASES)
def test_causal_conv1d(device: torch.device, seed: int, case: str) -> None:
    channels, width, has_bias, has_silu = conv_cases.CASES[case]
    weight, bias = random(channels, width, seed=seed), random(channels, seed=seed + 1) if has_bias else None
    moved = weight.to(device), None if bias is None else bias.to(device)
    assert_right_and_independent(
        lambda inputs, state, slots: conv_gpu.causal_conv1d(inputs[0], *moved, state, slots, has_silu=has_silu),
        lambda x: conv_reference.causal_conv1d(x, weight, bias, has_silu=has_silu),
        (channels,),
        (width - 1, channels),
        device,
        seed,
    )


@pytest.mark.parametrize("case", some(scan_cases.CASES))
def test_selective_scan(device: torch.device, seed: int, case: str) -> None:
    num_heads, head_dim, state_size, num_groups = scan_cases.CASES[case]
    numbers = [random(num_heads, seed=seed + index) for index in range(3)]
    moved = ScanWeights(*(part.to(device) for part in numbers), 0.01, 2.5)
    assert_right_and_independent(
        lambda inputs, state, slots: scan_gpu.selective_scan(*inputs, moved, state, slots),
        lambda *inputs: scan_reference.selective_scan(*inputs, ScanWeights(*numbers, 0.01, 2.5), state_size),
        (num_heads * head_dim, num_groups * state_size, num_groups * state_size, num_heads),
        (num_heads, state_size, head_dim),
        device,
        seed,
    )


@pytest.mark.parametrize("case", some(delta_cases.CASES))
def test_gated_delta_rule(device: torch.device, seed: int, case: str) -> None:
    num_key_heads, num_heads, key_dim, value_dim = delta_cases.CASES[case]
    numbers = [random(num_heads, seed=seed + index) for index in range(2)]
    moved = DeltaWeights(*(part.to(device) for part in numbers))
    key_width, value_width = num_key_heads * key_dim, num_heads * value_dim
    assert_right_and_independent(
        lambda inputs, state, slots: delta_gpu.gated_delta_rule(*inputs, moved, state, slots),
        lambda *inputs: delta_reference.gated_delta_rule(*inputs, DeltaWeights(*numbers), key_dim),
        (key_width, key_width, value_width, num_heads, num_heads),
        (num_heads, key_dim, value_dim),
        device,
        seed,
    )


def test_steps_far_from_one(device: torch.device) -> None:
    """Step sizes and decays that underflow or are large: softplus has no overflow, and its small values are exact."""
    num_heads, head_dim, state_size, num_groups = scan_cases.CASES["odd"]
    zeros = torch.zeros(num_heads)
    weights = ScanWeights(*[zeros.to(device)] * 3)
    widths = num_heads * head_dim, num_groups * state_size, num_groups * state_size
    inputs = [random(9, width, seed=width) for width in widths]
    inputs.append(torch.linspace(-60.0, 60.0, 9 * num_heads).view(9, num_heads))
    ours = alone(
        on_device(lambda rows, state, slots: scan_gpu.selective_scan(*rows, weights, state, slots), device),
        inputs,
        (num_heads, state_size, head_dim),
    )
    out, _ = scan_reference.selective_scan(*inputs, ScanWeights(*[zeros] * 3), state_size)
    torch.testing.assert_close(ours.out.double(), out, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("case", "dtype"), [*zip(norm_cases.CASES, [*norm_cases.TOLERANCES] * 2, strict=True)], ids=str
)
def test_gated_rms_norm(device: torch.device, seed: int, case: tuple[int, int, bool], dtype: torch.dtype) -> None:
    width, num_groups, is_gate_first = case
    x, gate = (random(5, width, dtype=dtype, seed=seed + index, scale=2.0) for index in range(2))
    weight = random(width, dtype=dtype, seed=seed)
    options = {"num_groups": num_groups, "is_gate_first": is_gate_first}
    expected = norm_reference.gated_rms_norm(x, gate, weight, 1e-5, **options)
    rows = torch.cat((x, gate), 1).to(device)

    def norm(rows: Tensor, weight: Tensor = weight) -> Tensor:
        x, gate = rows.chunk(2, dim=1)
        return norm_gpu.gated_rms_norm(x, gate, weight.to(device), 1e-5, num_segments=1, sums_TR=None, **options)

    assert_close(norm(rows).cpu(), expected, norm_cases.TOLERANCES[dtype])
    assert same_bits(norm(rows[3:4]), norm(rows)[3:4])
    part = weight[: width // num_groups]
    assert torch.equal(norm(rows, part), norm(rows, part.repeat(num_groups)))


@pytest.mark.parametrize("has_silu", [False, True])
def test_multiply(device: torch.device, seed: int, *, has_silu: bool) -> None:
    for width, dtype in zip(product_cases.WIDTHS, product_cases.TOLERANCES, strict=True):
        x, gate = (random(5, width, dtype=dtype, seed=seed + index, scale=4.0) for index in range(2))
        expected = product_reference.multiply(x, gate, has_silu=has_silu)
        for rows in (slice(0, 5), slice(4, 5)):
            actual = product_gpu.multiply(*torch.cat((x, gate), 1).to(device)[rows].chunk(2, dim=1), has_silu=has_silu)
            assert_close(actual.cpu(), expected[rows], product_cases.TOLERANCES[dtype])
        expected = product_reference.multiply(x, gate[:, :1], has_silu=has_silu)
        actual = product_gpu.multiply(x.to(device), gate[:, :1].to(device), has_silu=has_silu)
        assert_close(actual.cpu(), expected, product_cases.TOLERANCES[dtype])
