"""`octavo quantize`: what the ways of rounding promise, and what they pack, read by the published formulas."""

import torch
from compressed_tensors.compressors import unpack_from_int32

from octavo.worker_proc.quantization import formats, gptq
from octavo.worker_proc.quantization.rounding import to_fp8, to_groups, to_int8

GROUP = 32


def weight(num_outputs: int = 24, num_inputs: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_inputs)
    return torch.randn(num_outputs, num_inputs, generator=generator) ** 3


def correlated_rows(num_inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    causes = torch.randn(600, num_inputs // 8, generator=generator)
    return causes @ torch.randn(num_inputs // 8, num_inputs, generator=generator) + 0.1 * torch.randn(
        600, num_inputs, generator=generator
    )


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """The levels in the last dimension of int32 words, the lowest four bits first."""
    return torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(-2)


def test_groups_reproduce_what_their_levels_can_express() -> None:
    levels = torch.randint(0, 16, (6, 64), generator=torch.Generator().manual_seed(0))
    levels[:, ::GROUP], levels[:, 1::GROUP] = 0, 15  # the whole range is used
    values = 0.5 * (levels - 5)
    groups = to_groups(values, GROUP, is_symmetric=False)
    assert torch.equal(groups.values(), values.float())
    assert torch.equal(groups.zero_OG, torch.full((6, 2), 5, dtype=torch.uint8))


def test_the_range_of_a_group_is_chosen_by_its_error() -> None:
    values = weight()
    largest_OG = values.view(24, -1, GROUP).abs().amax(2, keepdim=True)
    scale_OG = largest_OG * 2 / 15
    plain = ((values.view(24, -1, GROUP) / scale_OG).round().clamp(-8, 7) * scale_OG).view(values.shape)
    chosen = to_groups(values, GROUP, is_symmetric=True).values()
    assert (chosen - values).square().sum() < 0.95 * (plain - values).square().sum()


def test_inputs_that_matter_are_rounded_more_precisely() -> None:
    values, importance = weight(), torch.ones(128)
    importance[::16] = 1000
    by_importance = (to_groups(values, GROUP, is_symmetric=False, importance_I=importance).values() - values).square()
    equally = (to_groups(values, GROUP, is_symmetric=False).values() - values).square()
    assert by_importance[:, ::16].sum() < equally[:, ::16].sum()


def test_zeros_have_scales_that_divide() -> None:
    zeros = torch.zeros(8, 64)
    for is_symmetric in (False, True):
        groups = to_groups(zeros, GROUP, is_symmetric=is_symmetric)
        assert torch.equal(groups.values(), zeros)
    for levels, scale in (to_int8(zeros), to_fp8(zeros)):
        assert torch.equal(levels.float() * scale, zeros)


def test_channels_use_their_whole_range() -> None:
    levels, scale = to_int8(weight())
    assert torch.equal(levels.abs().amax(1), torch.full((24,), 127, dtype=torch.int8))
    assert (levels * scale - weight()).abs().max() <= scale.max() / 2 * 1.001
    numbers, scale = to_fp8(weight())
    assert torch.equal(numbers.float().abs().amax(1), torch.full((24,), 448.0))


def test_gptq_loses_less_than_rounding_each_weight() -> None:
    values, rows = weight(), correlated_rows(128)
    wanted = rows @ values.T
    nearest = (rows @ to_groups(values, GROUP, is_symmetric=True).values().T - wanted).square().mean()
    for by_activation in (False, True):
        hessian = gptq.Hessian(128)
        for part in rows.split(150):
            hessian.add(part)
        rounded = gptq.round_weight(values, hessian, GROUP, orders_by_activation=by_activation)
        assert (rows @ rounded.values().T - wanted).square().mean() < 0.3 * nearest
        assert torch.equal(rounded.group_of_input_I.bincount(), torch.full((4,), GROUP))
        assert by_activation != torch.equal(rounded.group_of_input_I, torch.arange(128) // GROUP)


def test_gptq_takes_groups_longer_than_its_blocks_and_inputs_that_are_never_used() -> None:
    values, rows = weight(16, 512), correlated_rows(512)
    rows[:, 7] = 0
    hessian = gptq.Hessian(512)
    hessian.add(rows)
    rounded = gptq.round_weight(values, hessian, 256, orders_by_activation=False)
    assert torch.equal(rounded.values()[:, 7], torch.zeros(16))
    nearest = to_groups(values, 256, is_symmetric=True).values()
    wanted = rows @ values.T
    assert (rows @ rounded.values().T - wanted).square().mean() < (rows @ nearest.T - wanted).square().mean()


def test_gptq_tensors_hold_the_rounded_weight() -> None:
    """The formula of AutoGPTQ: scales[g_idx] * (qweight - (qzeros + 1)[g_idx]), inputs by outputs."""
    hessian = gptq.Hessian(128)
    hessian.add(correlated_rows(128))
    rounded = gptq.round_weight(weight(), hessian, GROUP, orders_by_activation=True)
    tensors = dict(formats.gptq_tensors("m", rounded.levels, rounded.group_of_input_I))
    levels_IO = nibbles(tensors["m.qweight"].T).T
    zeros_GO = (nibbles(tensors["m.qzeros"]) + 1) & 15
    group_I = tensors["m.g_idx"].long()
    values_IO = tensors["m.scales"].float()[group_I] * (levels_IO - zeros_GO[group_I])
    assert torch.equal(values_IO.T, rounded.values())


def test_awq_tensors_hold_the_rounded_weight() -> None:
    """AutoAWQ's words hold columns 0 2 4 6 1 3 5 7; the value is (qweight - qzeros) * scales, inputs by outputs."""
    groups = to_groups(weight(), GROUP, is_symmetric=False)
    tensors = dict(formats.awq_tensors("m", groups))
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    levels_IO = nibbles(tensors["m.qweight"]).unflatten(1, (-1, 8))[..., order].flatten(1)
    zeros_GO = nibbles(tensors["m.qzeros"]).unflatten(1, (-1, 8))[..., order].flatten(1)
    values_IO = (levels_IO - zeros_GO.repeat_interleave(GROUP, 0)) * tensors["m.scales"].float().repeat_interleave(
        GROUP, 0
    )
    assert torch.equal(values_IO.T, groups.values())


def test_int4_tensors_are_what_compressed_tensors_unpacks() -> None:
    groups = to_groups(weight(), GROUP, is_symmetric=True)
    tensors = dict(formats.int4_tensors("m", weight(), GROUP))
    levels_OI = unpack_from_int32(tensors["m.weight_packed"], 4, torch.Size(tensors["m.weight_shape"].tolist()))
    scale_OI = tensors["m.weight_scale"].float().repeat_interleave(GROUP, 1)
    assert torch.equal(levels_OI * scale_OI, groups.values())
