"""`sample_rows` on a GPU: the reference's tokens, rows that do not know of each other, and counts kept up to date."""

import math

import pytest
import torch
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.sample import RequestTable, cases, gpu, reference
from octavo.kernels.token_mask import pack_mask

REQUESTS = cases.REQUESTS[::5] if IS_INTERPRETING else cases.REQUESTS
"""In the interpreter, which is slow, every change of logits and every way to draw, but not every pair of them."""


def table_of(requests: list[cases.Request], vocab_size: int, device: torch.device) -> RequestTable:
    """Return a table with one request in each row."""
    table = RequestTable.allocate(
        len(requests), vocab_size, max_biases=4, max_withheld=3, max_bad=5, max_seen=8, device=torch.device("cpu")
    )

    def fill(slot: int, ids: torch.Tensor, num_ids: torch.Tensor, values: list[int]) -> None:
        ids[slot, : len(values)] = torch.tensor(values, dtype=torch.int32)
        num_ids[slot] = len(values)

    for slot, request in enumerate(requests):
        table.temperature_S[slot] = request.temperature
        table.seed_S[slot] = request.seed - 2**64 if request.seed >= 2**63 else request.seed
        table.top_k_S[slot], table.top_p_S[slot] = request.top_k, request.top_p
        table.log_min_p_S[slot] = math.log(request.min_p) if request.min_p else -math.inf
        fill(slot, table.bias_ids_SB, table.num_biases_S, list(request.bias))
        table.bias_values_SB[slot, : len(request.bias)] = torch.tensor(list(request.bias.values()))
        fill(slot, table.withheld_ids_SE, table.num_withheld_S, request.withheld)
        table.min_tokens_S[slot] = request.min_tokens
        fill(slot, table.bad_ids_SX, table.num_bad_S, request.bad)
        fill(slot, table.seen_ids_SL, table.num_seen_S, list(request.seen))
        table.output_counts_SL[slot, : len(request.seen)] = torch.tensor(list(request.seen.values()), dtype=torch.int32)
        table.has_penalties_S[slot] = bool(request.seen)
        names = ("repetition", "frequency", "presence")
        table.penalties_S3[slot] = torch.tensor([request.penalties[name] for name in names])
        if request.allowed is not None:
            table.has_mask_S[slot] = 1
            table.allowed_SW[slot] = pack_mask(request.allowed, vocab_size)
    return RequestTable(**{name: getattr(table, name).to(device) for name in RequestTable.__slots__})


def rows_of(vocab_size: int, spread: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size + seed)
    return spread * torch.randn(len(REQUESTS), vocab_size, generator=generator)


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("vocab_size", cases.VOCAB_SIZES[:3:2] if IS_INTERPRETING else cases.VOCAB_SIZES)
def test_equals_reference(device: torch.device, seed: int, vocab_size: int, spread: float) -> None:
    rows = rows_of(vocab_size, spread, seed)
    positions = torch.arange(100, 100 + len(REQUESTS))
    num_outputs = torch.arange(len(REQUESTS)) % 5
    logits = rows.to(device)
    drawn = gpu.sample_rows(
        logits,
        table_of(REQUESTS, vocab_size, device),
        torch.arange(len(REQUESTS), device=device),
        positions.to(device),
        num_outputs.to(device),
        largest=cases.LARGEST,
    )
    assert torch.equal(logits.cpu(), rows)
    assert drawn.tolist() == [
        reference.sample(row, request, position=position, num_outputs=count)
        for row, request, position, count in zip(rows, REQUESTS, positions.tolist(), num_outputs.tolist(), strict=True)
    ]


def test_a_token_does_not_depend_on_the_other_rows(device: torch.device, seed: int) -> None:
    rows, table = rows_of(151, 2.0, seed).to(device), table_of(REQUESTS, 151, device)
    slots = torch.arange(len(REQUESTS), device=device)
    sevens = torch.full_like(slots, 7)
    together = gpu.sample_rows(rows, table, slots, sevens, sevens, largest=cases.LARGEST)
    backwards = gpu.sample_rows(rows.flip(0), table, slots.flip(0), sevens, sevens, largest=cases.LARGEST)
    assert torch.equal(backwards.flip(0), together)
    for row in range(0, len(REQUESTS), 7):
        alone = gpu.sample_rows(rows[row : row + 1], table, slots[row : row + 1], sevens[:1], sevens[:1], largest=1e30)
        assert alone[0] == together[row]


def test_rows_that_are_no_numbers_have_no_token(device: torch.device) -> None:
    request = cases.Request(temperature=0.7, top_p=0.9, seen={3: 1})
    table = table_of([request] * 3, 64, device)
    rows = torch.zeros(3, 64, device=device)
    rows[1, 63], rows[2, 3] = torch.nan, torch.nan
    slots = torch.arange(3, device=device)
    drawn = gpu.sample_rows(rows, table, slots, slots, slots, largest=cases.LARGEST).tolist()
    assert 0 <= drawn[0] < 64
    assert drawn[1:] == [-1, -1]


def test_drawn_tokens_are_counted(device: torch.device) -> None:
    requests = [cases.Request(seen={5: 0, 9: 2}), cases.Request(), cases.Request(seen={1: 1})]
    table = table_of(requests, 64, device)
    for tokens in ([9, 3, 4], [7, 3, -1], [7, 3, 4]):
        gpu.count_tokens(table, torch.arange(3, device=device), torch.tensor(tokens, device=device))
    counted = [
        dict(zip(ids[:number], counts[:number], strict=True))
        for ids, counts, number in zip(
            table.seen_ids_SL.tolist(), table.output_counts_SL.tolist(), table.num_seen_S.tolist(), strict=True
        )
    ]
    assert counted == [{5: 0, 9: 3, 7: 2}, {}, {1: 1, 4: 2}]
