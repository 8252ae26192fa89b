"""`gated_rms_norm` and `multiply`: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random
from native_checks import NATIVE_DTYPES, native_rows
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.gated_rms_norm import cases as norm_cases
from octavo.kernels.gated_rms_norm import gated_rms_norm, gated_square_sums
from octavo.kernels.gated_rms_norm import reference as norm_reference
from octavo.kernels.gated_rms_norm.native import GatedRmsNormArguments, GatedSquareSumsArguments
from octavo.kernels.multiply import cases as product_cases
from octavo.kernels.multiply import multiply
from octavo.kernels.multiply import reference as product_reference
from octavo.kernels.multiply.native import MultiplyArguments
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.library import NativeLibrary

EPS = 1e-5


@pytest.mark.parametrize("dtype", norm_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("case", norm_cases.CASES, ids=str)
def test_gated_rms_norm(case: tuple[int, int, bool], dtype: torch.dtype) -> None:
    width, num_groups, is_gate_first = case
    x, gate = (random(45, width, dtype=dtype, seed=seed, scale=2.0) for seed in (1, 2))
    weight = random(width, dtype=dtype, seed=3)
    options = {"num_groups": num_groups, "is_gate_first": is_gate_first}
    expected = norm_reference.gated_rms_norm(x, gate, weight, EPS, **options)
    assert_close(gated_rms_norm(x, gate, weight, EPS, **options), expected, norm_cases.TOLERANCES[dtype])
    assert_rows_independent(
        lambda rows: gated_rms_norm(*rows.chunk(2, dim=1), weight, EPS, **options), torch.cat((x, gate), 1)
    )
    part = weight[: width // num_groups]
    assert torch.equal(
        gated_rms_norm(x, gate, part, EPS, **options),
        gated_rms_norm(x, gate, part.repeat(num_groups), EPS, **options),
    )


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("case", norm_cases.CASES, ids=str)
def test_native_gated_rms_norm(native_library: NativeLibrary, case: tuple[int, int, bool], dtype: torch.dtype) -> None:
    width, num_groups, is_gate_first = case
    x, gate, weight = random(20, width, seed=1), random(20, width, seed=2, scale=20.0), random(width, seed=3)
    ours = native_rows(
        native_library,
        "gated_rms_norm",
        lambda inputs, out: GatedRmsNormArguments(
            *inputs, Matrix(), out, weight.data_ptr(), num_groups, 1, EPS, is_gate_first
        ),
        [x, gate],
        width,
        dtype,
    )
    expected = norm_reference.gated_rms_norm(x, gate, weight, EPS, num_groups=num_groups, is_gate_first=is_gate_first)
    assert_close(ours, expected.to(dtype), norm_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("is_gate_first", [False, True])
def test_ranks_that_share_a_group_get_the_bits_of_one(
    native_library: NativeLibrary, num_ranks: int, *, is_gate_first: bool
) -> None:
    width, num_segments = 8 * 24, 8
    x, gate, weight = random(9, width, seed=1), random(9, width, seed=2), random(width, seed=3)

    def native(x: Tensor, gate: Tensor, weight: Tensor, num_segments: int, sums: Tensor | None) -> Tensor:
        return native_rows(
            native_library,
            "gated_rms_norm",
            lambda inputs, out: GatedRmsNormArguments(
                *inputs[:2],
                inputs[2] if sums is not None else Matrix(),
                out,
                weight.data_ptr(),
                1,
                num_segments,
                EPS,
                is_gate_first,
            ),
            [x, gate] if sums is None else [x, gate, sums],
            x.shape[1],
            torch.float32,
        )

    whole = native(x, gate, weight, num_segments, None)
    expected = norm_reference.gated_rms_norm(x, gate, weight, EPS, num_groups=1, is_gate_first=is_gate_first)
    assert_close(whole, expected, norm_cases.TOLERANCES[torch.float32])
    own = [[part.contiguous() for part in values.chunk(num_ranks, dim=-1)] for values in (x, gate, weight)]
    options = {"is_gate_first": is_gate_first, "num_segments": num_segments // num_ranks}
    sums = [
        native_rows(
            native_library,
            "gated_square_sums",
            lambda inputs, out: GatedSquareSumsArguments(*inputs, out, num_segments // num_ranks, is_gate_first),
            [x, gate],
            1,
            torch.float32,
        )
        for x, gate, _ in zip(*own, strict=True)
    ]
    of_all = torch.cat(sums, dim=1)
    parts = [native(x, gate, weight, num_segments // num_ranks, of_all) for x, gate, weight in zip(*own, strict=True)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    through_torch = [gated_square_sums(x, gate, **options) for x, gate, _ in zip(*own, strict=True)]
    assert_close(torch.cat(through_torch, dim=1), of_all, 1e-5)
    last = gated_rms_norm(*(values[-1] for values in own), EPS, sums_TR=torch.cat(through_torch, dim=1), **options)
    assert_close(last, parts[-1], norm_cases.TOLERANCES[torch.float32])


@pytest.mark.parametrize("has_silu", [False, True])
@pytest.mark.parametrize("dtype", product_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", product_cases.WIDTHS)
def test_multiply(native_library: NativeLibrary, width: int, dtype: torch.dtype, *, has_silu: bool) -> None:
    x, gate = (random(45, width, dtype=dtype, seed=seed, scale=4.0) for seed in (1, 2))
    expected = product_reference.multiply(x, gate, has_silu=has_silu)
    assert_close(multiply(x, gate, has_silu=has_silu), expected, product_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda rows: multiply(*rows.chunk(2, dim=1), has_silu=has_silu), torch.cat((x, gate), 1))
    ours = native_rows(
        native_library,
        "multiply",
        lambda inputs, out: MultiplyArguments(*inputs, out, has_silu),
        [x.float(), gate.float()],
        width,
        dtype,
    )
    assert_close(ours, expected, product_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", product_cases.TOLERANCES, ids=str)
def test_multiply_by_one_number_for_each_row(native_library: NativeLibrary, dtype: torch.dtype) -> None:
    width = product_cases.WIDTHS[1]
    x, gate = random(45, width, dtype=dtype, seed=1, scale=4.0), random(45, 1, dtype=dtype, seed=2)
    expected = product_reference.multiply(x, gate, has_silu=False)
    assert_close(multiply(x, gate), expected, product_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda rows: multiply(*rows.split((width, 1), dim=1)), torch.cat((x, gate), 1))
    ours = native_rows(
        native_library,
        "multiply",
        lambda inputs, out: MultiplyArguments(*inputs, out, 0),
        [x.float(), gate.float()],
        width,
        dtype,
    )
    assert_close(ours, expected, product_cases.TOLERANCES[dtype])


def test_gates_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ShapeError, match="gated_rms_norm"):
        gated_rms_norm(random(3, 6), random(3, 6), random(4), EPS, num_groups=2, is_gate_first=True)
    with pytest.raises(ShapeError, match="multiply"):
        multiply(random(3, 6), random(3, 5))
