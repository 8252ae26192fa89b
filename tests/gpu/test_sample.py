"""`sample_rows` on a GPU: the reference's tokens, rows that do not know of each other, and counts kept up to date.

The cases are those of `tests/kernels/test_sample.py`.
"""

import itertools

import pytest
import torch
from sampled_cases import POSITION, expected_of, logits_of, table_of
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.gumbel_sample import cases as gumbel_cases
from octavo.kernels.gumbel_sample import reference as gumbel_reference
from octavo.kernels.logprobs.gpu import logprobs_of_rows
from octavo.kernels.logprobs.memory import IS_LOGIT, PROCESSED, RAW, LogprobsMemory
from octavo.kernels.sample import cases, gpu

VOCAB_SIZES = [151] if IS_INTERPRETING else cases.VOCAB_SIZES


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equals_reference(device: torch.device, seed: int, vocab_size: int) -> None:
    rows = logits_of(cases.REQUESTS, vocab_size, seed)
    check_tokens(rows, cases.REQUESTS, device)


def test_parts_of_a_row_equal_the_reference(device: torch.device, seed: int) -> None:
    """Three programs for each row; some rows have more candidates than are stored."""
    requests = [
        cases.SamplingCase(temperature=1.0, seed=1),
        cases.SamplingCase(temperature=0.0, bias={8999: 9.0, 4096: 9.0}),
        cases.SamplingCase(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, seen={0: 1, 4095: 1, 8999: 2}),
        cases.SamplingCase(temperature=1.5, top_k=20, allowed=[3, 5000, 8999]),
        cases.SamplingCase(temperature=1.0, top_p=0.95, spread=0.1),
        cases.SamplingCase(temperature=1.0, top_k=8500, top_p=0.99, spread=0.1, bad=[1, 4097]),
        cases.SamplingCase(temperature=1.0, top_k=8700, spread=0.0),
        cases.SamplingCase(temperature=1.0, top_p=0.97, min_p=0.001, withheld=[1, 8999], min_tokens=9),
    ]
    check_tokens(logits_of(requests, 9000, seed), requests, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_models_are_converted(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    requests = cases.REQUESTS[::5]
    check_tokens(logits_of(requests, 151, seed).to(dtype), requests, device)


@pytest.mark.parametrize(("num_candidates", "spread"), gumbel_cases.CASES)
def test_noise_equals_reference(device: torch.device, seed: int, num_candidates: int, spread: float) -> None:
    """Tokens without candidates have logits of minus infinity."""
    logits, ids = gumbel_cases.row(num_candidates, spread, seed)
    draws = list(itertools.product(gumbel_cases.SEEDS, (0, 1, 4095)))
    rows = torch.full((len(draws), int(ids[-1]) + 1), -torch.inf).index_copy_(1, ids, logits.repeat(len(draws), 1))
    table = table_of(
        [cases.SamplingCase(temperature=1.0, seed=draw_seed) for draw_seed, _ in draws], rows.shape[1], device
    )
    slots = torch.arange(len(draws), device=device)
    positions = torch.tensor([position for _, position in draws], device=device)
    drawn = gpu.sample_rows(rows.to(device), table, slots, positions, slots, largest=cases.LARGEST).tolist()
    assert drawn == [
        gumbel_reference.gumbel_sample(logits, ids, seed=one, position=position) for one, position in draws
    ]


def check_tokens(rows: torch.Tensor, requests: list[cases.SamplingCase], device: torch.device) -> None:
    logits = rows.to(device)
    num_rows = len(requests)
    drawn = gpu.sample_rows(
        logits,
        table_of(requests, rows.shape[1], device),
        torch.arange(num_rows, device=device),
        torch.arange(POSITION, POSITION + num_rows, device=device),
        torch.tensor([request.num_outputs for request in requests], device=device),
        largest=cases.LARGEST,
    ).tolist()
    expected = expected_of(rows.float(), requests)
    wrong = [index for index, tokens in enumerate(zip(drawn, expected, strict=True)) if tokens[0] != tokens[1]]
    assert not wrong, [requests[index] for index in wrong]
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


def test_logprobs_are_reported_with_the_draw(device: torch.device, seed: int) -> None:
    """The bits of `logprobs_of_rows` on the same values, for every mode; nothing of rows that report nothing."""
    requests = cases.REQUESTS[::7]
    drawn_from = logits_of(requests, 151, seed).to(device)
    raw = drawn_from.flip(1).contiguous()
    table, slots = table_of(requests, 151, device), torch.arange(len(requests), device=device)
    modes = torch.tensor(
        [(0, PROCESSED, RAW, PROCESSED | IS_LOGIT, RAW | IS_LOGIT)[row % 5] for row in range(len(raw))]
    )
    table.report_S.copy_(modes)
    table.num_top_S.copy_(slots % 4)
    memory = LogprobsMemory.allocate(len(requests), device)
    options = {"largest": cases.LARGEST, "logprobs": memory, "raw_RV": raw}
    tokens = gpu.sample_rows(drawn_from, table, slots, slots, slots, **options)
    processed = gpu.processed_logits(drawn_from, table, slots, slots, largest=cases.LARGEST)
    values = torch.where((modes & RAW).bool().unsqueeze(1).to(device), raw, processed)
    chosen, ranks, top_ids, top = logprobs_of_rows(values, tokens, 3)
    for row, mode in enumerate(modes.tolist()):
        if mode & IS_LOGIT:
            chosen[row], top[row] = values[row, tokens[row]], values[row, top_ids[row]]
        num_top = row % 4 if mode else 0
        assert torch.equal(memory.top_ids[row, :num_top], top_ids[row, :num_top])
        assert torch.equal(memory.top[row, :num_top], top[row, :num_top])
    is_reported = modes.to(device) > 0
    assert torch.equal(memory.chosen, torch.where(is_reported, chosen, 0.0))
    assert torch.equal(memory.ranks, torch.where(is_reported, ranks, 0))


@pytest.mark.parametrize("num_bad", [1, 64])
def test_rows_that_are_no_numbers_have_no_token(device: torch.device, num_bad: int) -> None:
    request = cases.SamplingCase(temperature=0.7, top_p=0.9, seen={3: 1})
    table = table_of([request] * 3, 64, device)
    rows = torch.zeros(3, 64, device=device)
    rows[1, 64 - num_bad :], rows[2, :num_bad] = torch.nan, torch.nan
    slots = torch.arange(3, device=device)
    drawn = gpu.sample_rows(rows, table, slots, slots, slots, largest=cases.LARGEST).tolist()
    assert 0 <= drawn[0] < 64
    assert drawn[1:] == [-1, -1]


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits(device: torch.device, temperature: float, top_k: int) -> None:
    logits = torch.zeros(5, 40, device=device)
    logits[1, 3], logits[2, 39], logits[3], logits[4, :39] = torch.nan, torch.inf, -torch.inf, -torch.inf
    table = table_of([cases.SamplingCase(temperature=temperature, top_k=top_k)] * 5, 40, device)
    slots = torch.arange(5, device=device)
    drawn = gpu.sample_rows(logits, table, slots, slots, slots, largest=cases.LARGEST).tolist()
    assert drawn[1:] == [-1, -1, -1, 39]
    assert 0 <= drawn[0] < 40
    assert temperature or drawn[0] == 0


def test_drawn_tokens_are_counted_and_are_the_last_of_their_slots(device: torch.device) -> None:
    requests = [cases.SamplingCase(seen={5: 0, 9: 2}), cases.SamplingCase(), cases.SamplingCase(seen={1: 1})]
    table = table_of(requests, 64, device)
    last = torch.full((4,), 63, device=device)
    for tokens in ([9, 3, 4], [7, 3, -1], [7, 3, 4]):
        gpu.record_tokens(table, torch.arange(3, device=device), torch.tensor(tokens, device=device), last)
        assert last.tolist() == [*(max(token, 0) for token in tokens), 63]
    counted = [
        dict(zip(ids[:number], counts[:number], strict=True))
        for ids, counts, number in zip(
            table.seen_ids_SL.tolist(), table.output_counts_SL.tolist(), table.num_seen_S.tolist(), strict=True
        )
    ]
    assert counted == [{5: 0, 9: 3, 7: 2}, {}, {1: 1, 4: 2}]
