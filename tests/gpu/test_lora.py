"""`lora` on a GPU: equal to the reference, and the same bits in any batch."""

import pytest
import torch
from lora_workers import add_on_workers
from pairwise import LONG_IF_INTERPRETED

from octavo.kernels.lora import gpu, lora, lora_embedding, reference
from octavo.kernels.lora.cases import CASES, TOLERANCES, Case
from octavo.kernels.lora.rows import AdapterRows

DTYPES = [torch.float32, torch.bfloat16]


def rows_of(slots: list[int], num_slots: int, device: torch.device) -> AdapterRows:
    rows = AdapterRows(num_slots)
    rows.slots_T = torch.tensor(slots, device=device)
    return rows


def filled(case: Case, dtype: torch.dtype, device: torch.device, *, is_table: bool = False) -> gpu.GpuLora:
    slots = gpu.new_slots(case.shape(dtype, is_table=is_table), device)
    for index, parts in enumerate(case.adapters(dtype)):
        slots.put(index, case.adapters(dtype, seed=9)[0])  # replaced by the next line
        slots.put(index, parts)
    return slots


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=LONG_IF_INTERPRETED if number % 2 != place else [])
        for number, case in enumerate([*CASES, Case(2100, (40, 16), ((16, 8), (70, 0)))])
        for place, dtype in enumerate(DTYPES)
    ],
)
def test_products(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    slots, num_slots = filled(case, dtype, device), len(case.ranks)
    noise = torch.Generator().manual_seed(0)
    x_TI = torch.randn(37, case.num_inputs, generator=noise).to(dtype)
    y_TO = torch.randn(37, sum(case.parts), generator=noise).to(dtype)
    of_rows = torch.randint(-1, num_slots, (37,), generator=noise).tolist()
    out_TO = lora(x_TI.to(device), y_TO.clone().to(device), slots, rows_of(of_rows, num_slots, device)).cpu()
    expected_TO = reference.lora(x_TI, y_TO, of_rows, case.adapters(dtype), case.shape(dtype))
    torch.testing.assert_close(out_TO, expected_TO, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 4)
    for row in (0, 9, 36):
        alone = slice(row, row + 1)
        rows = rows_of(of_rows[alone], num_slots, device)
        alone_1O = lora(x_TI[alone].to(device), y_TO[alone].clone().to(device), slots, rows).cpu()
        assert torch.equal(alone_1O, out_TO[alone])
    is_base_T = torch.tensor(of_rows) < 0
    assert is_base_T.any() and torch.equal(out_TO[is_base_T], y_TO[is_base_T])
    slots.clear(0)
    rows = rows_of([0] * 37, num_slots, device)
    assert torch.equal(lora(x_TI.to(device), y_TO.clone().to(device), slots, rows).cpu(), y_TO)


@pytest.mark.parametrize("divides_inputs", [False, True])
def test_workers_that_divide_both_factors(device: torch.device, divides_inputs: bool) -> None:
    """A of 35 rows on each of two workers, in two segments; or half of the inputs, in one."""
    dtype, size = torch.bfloat16, 2
    case = Case(2100, (40,), ((16,), (70,))) if divides_inputs else Case(2100, (40, 16), ((16, 8), (70, 0)))
    whole = filled(case, dtype, device)
    noise = torch.Generator().manual_seed(0)
    x_TI = torch.randn(20, case.num_inputs, generator=noise).to(device, dtype)
    y_TO = torch.randn(20, sum(case.parts), generator=noise).to(device, dtype)
    of_rows = torch.randint(-1, 2, (20,), generator=noise).tolist()
    expected_TO = lora(x_TI, y_TO.clone(), whole, rows_of(of_rows, 2, device))

    def added(chosen: slice) -> torch.Tensor:
        """Return the outputs of some rows."""
        rows = rows_of(of_rows[chosen], 2, device)
        out_TO, num_bytes = add_on_workers(
            lambda shape, exchange: gpu.new_slots(shape, device, exchange),
            case,
            dtype,
            size,
            x_TI[chosen],
            y_TO[chosen],
            rows,
            divides_inputs=divides_inputs,
        )
        assert num_bytes <= whole.num_bytes / size
        return out_TO

    out_TO = added(slice(None))
    if divides_inputs:
        torch.testing.assert_close(out_TO, expected_TO, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 4)
    else:
        assert torch.equal(out_TO, expected_TO)
    for row in (0, 19):
        assert torch.equal(added(slice(row, row + 1))[0], out_TO[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(50, (40,), ((8,), (19,)))
    slots = filled(case, dtype, device, is_table=True)
    noise = torch.Generator().manual_seed(0)
    y_TO, ids_T = torch.randn(20, 40, generator=noise).to(dtype), torch.randint(0, 50, (20,), generator=noise)
    of_rows = torch.randint(-1, 2, (20,), generator=noise).tolist()
    rows = rows_of(of_rows, 2, device)
    out_TO = lora_embedding(ids_T.to(device), y_TO.clone().to(device), slots, rows).cpu()
    shape = case.shape(dtype, is_table=True)
    expected_TO = reference.lora_embedding(ids_T, y_TO, of_rows, case.adapters(dtype), shape)
    torch.testing.assert_close(out_TO, expected_TO, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 4)
    nowhere_TO = lora_embedding(ids_T.to(device), y_TO.clone().to(device), slots, rows, first_id=50).cpu()
    assert torch.equal(nowhere_TO, y_TO)
