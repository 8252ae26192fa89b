"""`head_linear`: right, and the same for a row in any batch and on any number of threads."""

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random
from native_checks import LEVELS
from pairwise import pairwise_first
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.embedding import embedding
from octavo.kernels.head_linear import cases, head_linear, reference
from octavo.kernels.linear import PackedLinear, Packer
from octavo.kernels.native.arguments import StepArguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.passes import narrow
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.value import as_tensor, value_of

CPU = torch.device("cpu")
NUM_TOKENS = 300
"""More rows than fit into one block."""


def weights_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    num_heads, num_inputs, num_outputs, _ = shape
    return random(num_heads, num_outputs, num_inputs, dtype=dtype, seed=3, scale=num_inputs**-0.5)


def rows_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    return random(NUM_TOKENS, shape[0], shape[3], dtype=dtype, seed=4)


class HeadsProgram:
    """A program that looks up rows by token id and multiplies their heads."""

    def __init__(self, library: NativeLibrary, x_TNS: Tensor, heads: list[PackedLinear]) -> None:
        recorder = ProgramRecorder(x_TNS.dtype)
        rows = embedding(as_tensor(recorder.token_ids), x_TNS.flatten(1))
        results = [value_of(head_linear(rows.unflatten(1, tuple(x_TNS.shape[1:])), heads))]
        nodes = narrow(recorder.nodes, results)
        self._program = Program(library, nodes, results, NUM_TOKENS)

    def run(self, tokens: list[int], num_threads: int) -> Tensor:
        ids = torch.tensor(tokens)
        self._program.run(StepArguments(num_rows=len(ids), token_ids=ids.data_ptr()), num_threads)
        return self._program.results[0][: len(ids)].clone()


@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_head_linear_through_torch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    weights, x = weights_of(shape, dtype), rows_of(shape, dtype)[:40]
    heads = [Packer(CPU).pack(weight) for weight in weights]
    assert_close(head_linear(x, heads), reference.head_linear(x, weights), cases.TOLERANCES[dtype])
    assert_rows_independent(lambda rows: head_linear(rows, heads), x)


@pytest.mark.parametrize(
    ("native_library", "shape", "dtype"),
    pairwise_first(LEVELS, cases.SHAPES, list(cases.TOLERANCES)),
    indirect=["native_library"],
    ids=str,
)
def test_native_head_linear(
    native_library: NativeLibrary, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    weights, x = weights_of(shape, dtype), rows_of(shape, dtype)
    heads = [Packer(CPU, native_library).pack(weight) for weight in weights]
    program = HeadsProgram(native_library, x, heads)
    whole = program.run(list(range(NUM_TOKENS)), 2)
    assert_close(whole, reference.head_linear(x, weights).float(), cases.TOLERANCES[dtype])
    for num_threads in (1, 3):
        for tokens in ([0], [7, 7, 5], list(range(40, 200)), list(range(NUM_TOKENS))[::-1]):
            assert torch.equal(program.run(tokens, num_threads), whole[tokens]), (len(tokens), num_threads)


def test_rows_that_do_not_fit_are_rejected() -> None:
    heads = [Packer(CPU).pack(weight) for weight in random(3, 4, 5)]
    for shape in ((2, 2, 5), (2, 3, 4), (2, 15)):
        with pytest.raises(ShapeError, match="head_linear"):
            head_linear(random(*shape), heads)
    with pytest.raises(ShapeError, match="head_linear"):
        head_linear(random(2, 4, 5), [*heads, Packer(CPU).pack(random(5, 5))])
