"""`linear` on a GPU: right, and with our kernels the same for a row in any batch, tile and position."""

import logging
from dataclasses import replace

import pytest
import torch
from kernel_checks import assert_close, random
from pairwise import pairwise
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.linear import PackedLinear, cases, gpu, gpu_product, linear, linear_silu_and_mul, reference
from octavo.kernels.linear.gpu_product import InvariantLinear, TpInvariantLinear, gpu_of
from octavo.kernels.linear.gpu_tiles import Gpu
from octavo.kernels.silu_and_mul.gpu import silu_and_mul
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphSizes


def weight_of(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_inputs, num_outputs = shape
    weight = random(num_outputs, num_inputs, dtype=dtype, seed=seed, scale=num_inputs**-0.5)
    return weight, random(num_outputs, dtype=dtype, seed=seed + 1)


def gpus(device: torch.device, num_multiprocessors: int) -> list[Gpu]:
    """Return this GPU with another number of multiprocessors: without the TMA, and with it if it has one."""
    found = replace(gpu_of(device), num_multiprocessors=num_multiprocessors)
    return [replace(found, has_descriptors=False)] + [found] * found.has_descriptors


@pytest.mark.parametrize(
    ("shape", "dtype", "has_bias"),
    pairwise(cases.SHAPES[2:] if IS_INTERPRETING else cases.SHAPES, list(cases.TOLERANCES), [False, True]),
    ids=str,
)
def test_linear(device: torch.device, seed: int, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    weight, bias = weight_of(shape, dtype, seed)
    on_device = weight.to(device), bias.to(device) if has_bias else None
    products = [gpu.new_packer(is_batch_invariant=is_invariant).pack(*on_device) for is_invariant in (False, True)]
    products += [InvariantLinear.new(*on_device, one) for one in gpus(device, 132)]
    for rows in (1, 17, 130):
        x = random(rows, shape[0], dtype=dtype, seed=seed + rows)
        expected = reference.linear(x, weight, bias if has_bias else None)
        for product in products[IS_INTERPRETING:]:
            assert_close(product(x.to(device)).cpu(), expected, cases.TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("shape", "dtype", "num_multiprocessors", "num_splits"),
    [
        ((512, 200), torch.bfloat16, 8, 2),  # each split has its program, but not with 300 rows
        ((512, 300), torch.float16, 24, 2),  # each split has its program
        ((512, 200), torch.bfloat16, 1, 1),  # with the TMA tiles are wide
        ((80, 200), torch.float32, 4, 1),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_every_tile(
    device: torch.device,
    seed: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    num_multiprocessors: int,
    num_splits: int,
) -> None:
    weight, bias = (values.to(device) for values in weight_of(shape, dtype, seed))
    x = random(300, shape[0], dtype=dtype, seed=seed).to(device)
    whole = None
    for one in gpus(device, num_multiprocessors):
        product = InvariantLinear.new(weight, bias, one)
        assert product.tiling.num_splits == num_splits
        whole = product(x) if whole is None else whole
        for start, end in [(0, 1), (5, 45), (100, 230), (0, 300)]:
            assert torch.equal(product(x[start:end]), whole[start:end]), (start, end, one)
        for start, end in [(5, 45), (0, 300)][: 1 + (shape == (512, 200))]:
            gated = product.silu_and_mul(x[start:end])
            assert torch.equal(gated, silu_and_mul(whole[start:end])), (start, end, one)
        assert not product.num_done.any(), "the counters are ready for the next call"
    assert_close(whole.cpu(), reference.linear(x.cpu(), weight.cpu(), bias.cpu()), cases.TOLERANCES[dtype])


@pytest.mark.skipif(IS_INTERPRETING, reason="about the tensor cores and cuBLAS")
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 28672)], ids=str)
def test_a_row_has_the_same_bits_in_large_products(device: torch.device, seed: int, shape: tuple[int, int]) -> None:
    weight, bias = (values.to(device) for values in weight_of(shape, torch.bfloat16, seed))
    x = random(4100, shape[0], dtype=torch.bfloat16, seed=seed).to(device)
    own = InvariantLinear.new(weight, bias, gpu_of(device))
    for product in (own, gpu.new_packer(is_batch_invariant=True).pack(weight, bias)):
        whole = product(x)
        for start, end in [(0, 1), (17, 18), (4099, 4100), (5, 45), (100, 230), (0, 600), (0, 4099)]:
            assert torch.equal(product(x[start:end]), whole[start:end]), (start, end)


@pytest.mark.parametrize(
    ("num_multiprocessors", "all_num_ranks"),
    [
        (132, (1, 2)),  # each segment has its program
        (1, (1, 2, 4)),  # a program adds up two segments, and another kernel the pairs
    ],
)
def test_ranks_add_up_to_the_bits_of_one(
    device: torch.device,
    seed: int,
    num_multiprocessors: int,
    all_num_ranks: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_product, "GROUPED_ROWS", 128)
    num_inputs, num_segments, rows = 256, 8, 130
    weight, bias = (values.to(device) for values in weight_of((num_inputs, 72), torch.bfloat16, seed))
    x = random(rows, num_inputs, dtype=torch.bfloat16, seed=seed + 2).to(device)
    for one in gpus(device, num_multiprocessors):

        def sums(num_ranks: int, bias: torch.Tensor | None = None, one: Gpu = one) -> list[torch.Tensor]:
            parts = zip(x.chunk(num_ranks, 1), weight.chunk(num_ranks, 1), strict=True)
            products = [
                (x_part, TpInvariantLinear.new(part.contiguous(), bias, one).in_segments(num_segments, num_ranks))
                for x_part, part in parts
            ]
            return [product(x_part) for x_part, product in products]

        segments = sums(8)
        assert {part.dtype for part in segments} == {torch.float32}
        while len(segments) > 1:
            segments = [first + second for first, second in zip(segments[::2], segments[1::2], strict=True)]
            if len(segments) in all_num_ranks and len(segments) > 1:
                found = sums(len(segments))
                assert all(torch.equal(*pair) for pair in zip(found, segments, strict=True)), (len(segments), one)
        (whole,) = sums(1, bias)
        assert torch.equal(whole, (segments[0] + bias.float()).bfloat16()), one


def test_a_part_of_the_outputs_has_the_bits_of_the_whole(device: torch.device, seed: int) -> None:
    weight, bias = (values.to(device) for values in weight_of((1024, 200), torch.bfloat16, seed))
    x = random(3, 1024, dtype=torch.bfloat16, seed=seed).to(device)
    packer = gpu.Packer(is_batch_invariant=True, is_tp_invariant=True)
    whole = packer.pack(weight, bias, whole_outputs=20000)
    part = packer.pack(weight[:72], bias[:72], whole_outputs=20000)
    alone = packer.pack(weight[:72], bias[:72])
    assert whole.tiling.num_splits == part.tiling.num_splits < alone.tiling.num_splits
    assert torch.equal(part(x), whole(x)[:, :72])


def test_segments_are_whole_blocks(device: torch.device) -> None:
    weight = torch.zeros(8, 5 * 64 // 2, device=device)
    product = TpInvariantLinear.new(weight, None, gpu_of(device))
    assert product.in_segments(8, 1).tiling.num_segments == 2, "80 inputs, not 20"
    assert product.in_segments(8, 2).tiling.num_segments == 2, "of 4, which two ranks divide"
    with pytest.raises(ShapeError, match="1280 inputs can be added up in 4 segments, too few for 8 ranks"):
        TpInvariantLinear.new(weight, None, gpu_of(device)).in_segments(4, 8)


def test_the_splits_of_the_inputs_decide_the_bits(device: torch.device) -> None:
    """Otherwise the tests above would show nothing."""
    weight = torch.full((200, 512), 0.25, dtype=torch.bfloat16)
    x = torch.ones(40, 512, dtype=torch.bfloat16, device=device)
    # Ones of the second half are lost beside the first input, unless their own split adds them up.
    x[:, 0], x[:, -1] = 2.0**30, -(2.0**30)
    one, two = (InvariantLinear.new(weight.to(device), None, gpus(device, count)[0])(x) for count in (1, 8))
    assert not torch.equal(one, two)


def test_a_product_is_asked_for_numbers_of_rows_that_were_tried() -> None:
    asked = []

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        asked.append(len(x_TI))
        return x_TI + 1

    padded = gpu.PaddedLinear(product, (1, 2, 8))
    for num_rows in (1, 2, 3, 8, 19):
        x = torch.arange(2.0 * num_rows).view(num_rows, 2)
        assert torch.equal(padded(x), x + 1)
    assert asked == [1, 2, 8, 8, 8, 8, 8]
    assert padded(torch.empty(0, 2)).shape == (0, 2)
    assert [padded.padded_rows(num_rows) for num_rows in (1, 2, 3, 8, 19)] == [1, 2, 8, 8, 19]


def test_row_counts_with_other_bits_are_padded_over(device: torch.device) -> None:
    def careless(x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI + (2.0**-8 if len(x_TI) in (1, 5, 24) else 0.0)

    tested = gpu.row_counts(1 << 20)
    assert tested[-1] == 256
    agreeing = gpu.agreeing_row_counts(careless, 16, tested, 256, torch.bfloat16, device)
    assert set(tested) - set(agreeing) == {1, 5, 24}
    assert gpu.usable_row_counts(careless, 16, tested, torch.bfloat16, device) == agreeing
    x = torch.ones(24, 16, dtype=torch.bfloat16, device=device)
    assert torch.equal(gpu.PaddedLinear(careless, agreeing)(x), x)


def test_prefills_are_cut_if_only_large_row_counts_have_other_bits(device: torch.device) -> None:
    def careless(x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI + (1.0 if len(x_TI) > 600 else 0.0)

    usable = gpu.usable_row_counts(careless, 16, gpu.row_counts(1 << 15), torch.bfloat16, device)
    assert usable is not None
    assert (usable[0], usable[-1]) == (1, 576)


@pytest.mark.parametrize(
    ("agreeing", "is_little"),
    [
        ((1, 2, 8, 64, 80, 512, 8192), True),
        ((64, 80, 512, 8192), True),  # up to 64 rows padding is free
        ((1, 2, 8, 64, 512, 8192), False),  # 80 to 512
        ((1, 2, 8, 64, 80), False),  # prefills would be cut into small pieces
        ((), False),
    ],
)
def test_our_kernels_multiply_if_too_much_would_be_padded(agreeing: tuple[int, ...], is_little: bool) -> None:
    assert gpu.is_little_padding((1, 2, 8, 64, 80, 512, 8192), agreeing) == is_little


def test_a_sum_that_seldom_rounds_otherwise_is_found_out_with_a_single_row(device: torch.device) -> None:
    """One output in some thousands shows another order of summation, and one row has few outputs."""

    def seldom(x_TI: torch.Tensor) -> torch.Tensor:
        other = x_TI[:, :1] > 3.0  # one row in 700
        return x_TI + (other if len(x_TI) == 1 else 0.0)

    tested = gpu.row_counts(64)
    assert gpu.agreeing_row_counts(seldom, 64, tested[:9], 16, torch.bfloat16, device) == tested[:9]
    assert gpu.agreeing_row_counts(seldom, 64, tested, 8192, torch.bfloat16, device) == tested[1:]


def test_every_size_of_a_graph_is_tried() -> None:
    sizes = GraphSizes.of(512, 8192)
    assert {*sizes.decodes.largest_first, *sizes.prompts.largest_first} <= set(gpu.row_counts(4096))


def test_the_choice_is_made_and_logged_once_per_shape(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = iter([gpu.row_counts(36)[1:], None])
    monkeypatch.setattr(gpu, "usable_row_counts", lambda *arguments: next(choices))
    packer = gpu.Packer(is_batch_invariant=True)
    weights = [torch.zeros(36, num_inputs) for num_inputs in (48, 48, 64)]
    with caplog.at_level(logging.INFO):
        chosen = [packer._library_row_counts(gpu.LibraryLinear(weight, None)) for weight in weights]
    assert chosen == [gpu.row_counts(36)[1:], gpu.row_counts(36)[1:], None]
    assert [record.getMessage() for record in caplog.records] == [
        "products of 48 inputs and 36 outputs: cuBLAS with 102 row counts; padded: 1",
        "products of 64 inputs and 36 outputs: our own kernels, because the row counts of cuBLAS disagree",
    ]


def test_rows_that_lie_apart(device: torch.device, seed: int) -> None:
    weight, _ = weight_of((48, 36), torch.bfloat16, seed)
    product = gpu.new_packer(is_batch_invariant=True).pack(weight.to(device), None)
    wide = random(5, 97, dtype=torch.bfloat16, seed=seed).to(device)
    for part in (wide[:, 48:96], wide[:, 49:], wide[:, :96:2], wide[:1, :48].expand(3, 48)):
        assert torch.equal(product(part), product(part.contiguous()))
    assert product(wide[:0, 49:]).shape == (0, 36)


def test_the_activation_is_fused_where_our_kernels_multiply(device: torch.device, seed: int) -> None:
    weight, bias = (values.to(device) for values in weight_of((48, 36), torch.bfloat16, seed))
    x = random(5, 48, dtype=torch.bfloat16, seed=seed).to(device)
    own = InvariantLinear.new(weight, bias, gpu_of(device))
    packed = PackedLinear(48, 36, torch.bfloat16, device, own)
    fused = linear_silu_and_mul(x, packed)
    assert torch.equal(fused, silu_and_mul(linear(x, packed)))
    assert fused.shape == (5, 18)
    odd = InvariantLinear.new(weight[:35], None, gpu_of(device))
    with pytest.raises(ShapeError, match="35 outputs have no two halves"):
        linear_silu_and_mul(x, PackedLinear(48, 35, torch.bfloat16, device, odd))
    with pytest.raises(ShapeError, match="with a weight of 48 inputs"):
        linear_silu_and_mul(x[:, :40], packed)
