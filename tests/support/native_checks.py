"""Runs a native operation over rows and checks the contract of all operations."""

import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix, StepArguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.isa import Processor
from octavo.kernels.native.library import NativeLibrary


def tested_levels(levels: Sequence[str]) -> list[str]:
    """Return the instruction sets to test: all, but only one of avx512_vnni and avx512.

    avx512_vnni differs from its neighbors only in products of 8-bit numbers and of bfloat16. On a processor with
    avx512_bf16, that level and avx512 cover both.
    """
    left_out = "avx512_vnni" if "avx512_bf16" in levels else "avx512" if "avx512_vnni" in levels else None
    return [level for level in levels if level != left_out]


LEVELS = os.environ.get("OCTAVO_TEST_LEVELS", "").split() or tested_levels(
    [level.name for level in Processor.read().levels()]
)
"""Instruction sets of this processor, best first, or those that `scripts/check_native` selected. Values of the fixture
`native_library`."""

IN_LONG_RUNS = {"avx512"} & set(LEVELS[1:]) if "OCTAVO_TEST_LEVELS" not in os.environ else set()
"""Levels that only `--long` tests: the preceding level has the same vectors, and the following one the same products of
bfloat16 and 8-bit numbers. Each level takes a minute to compile and one to test."""

NATIVE_DTYPES = [torch.float32, torch.bfloat16]
"""Output dtypes of row operations."""

MARGIN = 5
"""Columns next to a view that no operation may read or write."""


def step_of(rows: int, **indices: Tensor) -> StepArguments:
    """Return the arguments of a step of `rows` rows; `indices` are members of a step by name, which must outlive it."""
    return StepArguments(num_rows=rows, **{name: tensor.data_ptr() for name, tensor in indices.items()})


def beside_others(x: Tensor, fill: float = float("nan")) -> Tensor:
    """Return the same rows as a view into wider rows, whose other columns are `fill`."""
    wide = torch.full((x.shape[0], x.shape[1] + 2 * MARGIN), fill, dtype=x.dtype)
    view = wide[:, MARGIN : MARGIN + x.shape[1]]
    view.copy_(x)
    return view


def native_rows(
    library: NativeLibrary,
    name: str,
    arguments: Callable[[Sequence[Matrix], Matrix], Arguments],
    inputs: Sequence[Tensor],
    out_width: int,
    out_dtype: torch.dtype,
    **indices: Tensor,
) -> Tensor:
    """Run a row operation over `inputs` and return its output.

    Checks that the bits of a row depend neither on other rows nor on threads, that rows may be apart in memory, and
    that nothing besides the rows is written.
    """

    def compute(first: int, last: int, num_threads: int, *, views: bool) -> Tensor:
        parts = [x[first:last] for x in inputs]
        rows = last - first
        out = torch.full((rows, out_width), 7.0, dtype=out_dtype)
        if views:
            parts, out = [beside_others(part) for part in parts], beside_others(out, fill=7.0)
        step = step_of(rows, **{key: tensor[first:last] for key, tensor in indices.items()})
        call = arguments([Matrix.of(part) for part in parts], Matrix.of(out))
        run(library, name, call, step=step, num_threads=num_threads)
        if views:
            assert out._base is not None
            beside = torch.cat((out._base[:, :MARGIN], out._base[:, MARGIN + out_width :]))
            assert torch.equal(beside, torch.full_like(beside, 7.0)), "wrote beside its rows"
        return out

    num_rows = len(next(iter(indices.values()), *inputs[:1]))
    whole = compute(0, num_rows, 1, views=False)
    for num_threads in (2, 3):
        assert same_bits(compute(0, num_rows, num_threads, views=True), whole), f"{num_threads} threads"
    for first, last in {(0, 1), (num_rows - 1, num_rows), (num_rows // 3, num_rows), (0, num_rows)}:
        assert same_bits(compute(first, last, 2, views=first == 0), whole[first:last]), (first, last)
    return whole


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors are equal: any NaN equals any NaN, and zeros must have equal signs."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(*(x.contiguous().view(integers).masked_fill(x.isnan(), -1) for x in (a, b)))


def odd_numbers() -> torch.Tensor:
    """Return floats of all exponents, including infinities, subnormals, and values at or near a tie of two bf16."""
    patterns = torch.randint(-(2**31), 2**31, (6, 4096), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    patterns[1] = (patterns[1] & ~0xFFFF) | 0x8000  # a tie
    patterns[2] = (patterns[2] & ~0xFFFF) | 0x7FFF
    patterns[3] = (patterns[3] & ~0xFFFF) | 0x8001
    patterns[4] &= ~0x7F800000  # subnormal
    patterns[5, :2048] = (patterns[5, :2048] & ~0xFFFF) | 0x7FFF
    x = patterns.view(torch.float32)
    x[0, :6] = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 3.4e38, -3.39e38])
    return x.nan_to_num(nan=1.0, posinf=math.inf, neginf=-math.inf)
