"""`lora` through torch and in C++: equal to the reference, and the same bits in any batch."""

import numpy as np
import pytest
import torch
from lora_workers import add_on_workers
from torch import Tensor

from octavo.kernels.lora import LoraSlots, lora, lora_embedding, new_slots, reference
from octavo.kernels.lora.cases import CASES, TOLERANCES, Case
from octavo.kernels.lora.rows import AdapterRows, GroupedRows
from octavo.kernels.native.library import NativeLibrary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def rows_of(slots: list[int], num_slots: int) -> AdapterRows:
    """Return the rows of a batch."""
    rows = AdapterRows(num_slots)
    rows.grouped = GroupedRows.of(np.array(slots, dtype=np.int32), num_slots)
    return rows


def random_batch(case: Case, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[int]]:
    """Return inputs, products and slots."""
    noise = torch.Generator().manual_seed(num_rows)
    x_TI = torch.randn(num_rows, case.num_inputs, generator=noise).to(dtype)
    y_TO = torch.randn(num_rows, sum(case.parts), generator=noise).to(dtype)
    slots = torch.randint(-1, len(case.ranks), (num_rows,), generator=noise).tolist()
    return x_TI, y_TO, slots


def filled(slots: LoraSlots, case: Case, dtype: torch.dtype) -> LoraSlots:
    """Put an adapter into every slot."""
    for index, parts in enumerate(case.adapters(dtype)):
        slots.put(index, parts)
    return slots


def check(slots: LoraSlots, case: Case, dtype: torch.dtype) -> None:
    """Compare a batch with the reference, each row with itself alone, and those without an adapter with `y`."""
    num_slots = len(case.ranks)
    x_TI, y_TO, of_rows = random_batch(case, 75, dtype)
    out_TO = lora(x_TI, y_TO.clone(), slots, rows_of(of_rows, num_slots))
    expected_TO = reference.lora(x_TI, y_TO, of_rows, case.adapters(dtype), case.shape(dtype))
    torch.testing.assert_close(out_TO, expected_TO, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 4)
    for row in (0, 7, 31, 74):
        alone = slice(row, row + 1)
        alone_1O = lora(x_TI[alone], y_TO[alone].clone(), slots, rows_of(of_rows[alone], num_slots))
        assert torch.equal(alone_1O, out_TO[alone])
    is_base_T = torch.tensor(of_rows) < 0
    assert is_base_T.any() and torch.equal(out_TO[is_base_T], y_TO[is_base_T])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_products_through_torch(case: Case, dtype: torch.dtype) -> None:
    check(filled(new_slots(case.shape(dtype), CPU), case, dtype), case, dtype)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_adapters_of_another_type_through_torch(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    case, (lora_dtype, dtype) = CASES[1], dtypes
    slots = filled(new_slots(case.shape(lora_dtype), CPU), case, lora_dtype)
    x_TI, y_TO, of_rows = random_batch(case, 20, dtype)
    out_TO = lora(x_TI, y_TO, slots, rows_of(of_rows, len(case.ranks)))
    expected_TO = reference.lora(
        x_TI.float(), y_TO.float(), of_rows, case.adapters(lora_dtype), case.shape(torch.float32)
    )
    assert out_TO.dtype == dtype
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(out_TO.float(), expected_TO, rtol=tolerance, atol=tolerance * 4)


FEW_ROWS = Case(40, (24, 8), ((3, 1), (2, 0)))
"""With four workers, one of them has no rows of A."""


@pytest.mark.parametrize(
    ("case", "size", "divides_inputs"), [(CASES[1], 2, False), (FEW_ROWS, 4, False), (CASES[3], 2, True)]
)
def test_workers_that_divide_both_factors_through_torch(case: Case, size: int, divides_inputs: bool) -> None:
    dtype = torch.float32
    x_TI, y_TO, of_rows = random_batch(case, 40, dtype)

    def added(chosen: slice) -> Tensor:
        """Return the outputs of some rows."""
        out_TO, _ = add_on_workers(
            lambda shape, exchange: new_slots(shape, CPU, exchange=exchange),
            case,
            dtype,
            size,
            x_TI[chosen],
            y_TO[chosen],
            rows_of(of_rows[chosen], len(case.ranks)),
            divides_inputs=divides_inputs,
        )
        return out_TO

    out_TO = added(slice(None))
    expected_TO = reference.lora(x_TI, y_TO, of_rows, case.adapters(dtype), case.shape(dtype))
    torch.testing.assert_close(out_TO, expected_TO, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 4)
    for row in (0, 39):
        assert torch.equal(added(slice(row, row + 1))[0], out_TO[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_native_products(native_library: NativeLibrary, case: Case, dtype: torch.dtype) -> None:
    check(filled(new_slots(case.shape(dtype), CPU, native_library), case, dtype), case, dtype)


def test_a_row_does_not_depend_on_the_number_of_threads(native_library: NativeLibrary) -> None:
    case, dtype = CASES[1], torch.bfloat16
    slots = filled(new_slots(case.shape(dtype), CPU, native_library), case, dtype)
    x_TI, y_TO, of_rows = random_batch(case, 40, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(lora(x_TI, y_TO.clone(), slots, rows_of(of_rows, len(case.ranks))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("is_native", [False, True])
def test_a_slot_is_replaced_and_cleared(is_native: bool, native_library: NativeLibrary) -> None:
    case, dtype = CASES[1], torch.float32
    slots = filled(new_slots(case.shape(dtype), CPU, native_library if is_native else None), case, dtype)
    slots.put(0, case.adapters(dtype, seed=1)[1])  # of smaller ranks
    x_TI, y_TO, _ = random_batch(case, 9, dtype)
    out_TO = lora(x_TI, y_TO.clone(), slots, rows_of([0] * 9, len(case.ranks)))
    expected_TO = reference.lora(x_TI, y_TO, [1] * 9, case.adapters(dtype, seed=1), case.shape(dtype))
    torch.testing.assert_close(out_TO, expected_TO, rtol=2e-6, atol=8e-6)
    slots.clear(0)
    assert torch.equal(lora(x_TI, y_TO.clone(), slots, rows_of([0] * 9, len(case.ranks))), y_TO)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_native", [False, True])
def test_tables(is_native: bool, dtype: torch.dtype, native_library: NativeLibrary) -> None:
    case = Case(50, (40,), ((8,), (19,)))
    shape = case.shape(dtype, is_table=True)
    slots = filled(new_slots(shape, CPU, native_library if is_native else None), case, dtype)
    _, y_TO, of_rows = random_batch(case, 30, dtype)
    ids_T = torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(1))
    rows = rows_of(of_rows, 2)
    out_TO = lora_embedding(ids_T, y_TO.clone(), slots, rows)
    expected_TO = reference.lora_embedding(ids_T, y_TO, of_rows, case.adapters(dtype), shape)
    torch.testing.assert_close(out_TO, expected_TO, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 4)
    # The part of another rank: only its own tokens get something.
    shifted_TO = lora_embedding(ids_T, y_TO.clone(), slots, rows, first_id=20)
    is_here_T = ids_T >= 20
    expected_TO = reference.lora_embedding((ids_T - 20).clamp(min=0), y_TO, of_rows, case.adapters(dtype), shape)
    expected_TO = expected_TO.where(is_here_T[:, None], y_TO)
    torch.testing.assert_close(shifted_TO, expected_TO, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 4)
