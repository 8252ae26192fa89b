"""`sample_rows` on a GPU: the reference's tokens, rows that do not know of each other, and counts kept up to date.

The cases are those of `tests/kernels/test_sample.py`.
"""

import pytest
import torch
from sampled_cases import POSITION, expected_of, logits_of, table_of
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.sample import cases, gpu

VOCAB_SIZES = [151] if IS_INTERPRETING else cases.VOCAB_SIZES
NUM_ROWS = len(cases.REQUESTS)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equals_reference(device: torch.device, seed: int, vocab_size: int) -> None:
    rows = logits_of(cases.REQUESTS, vocab_size, seed)
    logits = rows.to(device)
    drawn = gpu.sample_rows(
        logits,
        table_of(cases.REQUESTS, vocab_size, device),
        torch.arange(NUM_ROWS, device=device),
        torch.arange(POSITION, POSITION + NUM_ROWS, device=device),
        torch.tensor([request.num_outputs for request in cases.REQUESTS], device=device),
        largest=cases.LARGEST,
    ).tolist()
    expected = expected_of(rows, cases.REQUESTS)
    wrong = [index for index, tokens in enumerate(zip(drawn, expected, strict=True)) if tokens[0] != tokens[1]]
    assert not wrong, [cases.REQUESTS[index] for index in wrong]
    assert torch.equal(logits.cpu(), rows), "logits are left as they are"


def test_a_token_does_not_depend_on_the_other_rows(device: torch.device, seed: int) -> None:
    requests = cases.REQUESTS[::4]
    rows, table = logits_of(requests, 151, seed).to(device), table_of(requests, 151, device)
    slots = torch.arange(len(requests), device=device)
    sevens = torch.full_like(slots, 7)
    together = gpu.sample_rows(rows, table, slots, sevens, sevens, largest=cases.LARGEST)
    backwards = gpu.sample_rows(rows.flip(0), table, slots.flip(0), sevens, sevens, largest=cases.LARGEST)
    assert torch.equal(backwards.flip(0), together)
    for row in range(0, len(requests), 7):
        alone = gpu.sample_rows(rows[row : row + 1], table, slots[row : row + 1], sevens[:1], sevens[:1], largest=1e30)
        assert alone[0] == together[row]


@pytest.mark.parametrize("num_bad", [1, 64])
def test_rows_that_are_no_numbers_have_no_token(device: torch.device, num_bad: int) -> None:
    request = cases.Request(temperature=0.7, top_p=0.9, seen={3: 1})
    table = table_of([request] * 3, 64, device)
    rows = torch.zeros(3, 64, device=device)
    rows[1, 64 - num_bad :], rows[2, :num_bad] = torch.nan, torch.nan
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
