"""Selecting, filtering and drawing tokens on a GPU, each against its reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import LONG_IF_INTERPRETED
from torch import Tensor
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.filter_logits import cases as filter_cases
from octavo.kernels.filter_logits import reference as filter_reference
from octavo.kernels.filter_logits.gpu import find_cuts
from octavo.kernels.logprobs import cases as logprobs_cases
from octavo.kernels.logprobs import reference as logprobs_reference
from octavo.kernels.logprobs.gpu import logprobs_of_rows
from octavo.kernels.top_k import cases as top_k_cases
from octavo.kernels.top_k import reference as top_k_reference
from octavo.kernels.top_k.gpu import top_k_of_rows

# The interpreter is slow; a few blocks of a row show what many would.
TOP_K_CASES = [*top_k_cases.CASES[:5], (3000, 50)] if IS_INTERPRETING else top_k_cases.CASES
LOGPROBS_CASES = [*logprobs_cases.CASES[:3], (9000, 8999, 20)] if IS_INTERPRETING else logprobs_cases.CASES


def filter_logits(logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The tokens that the cuts of one row keep."""
    device, logits_RV = logits_V.device, logits_V.unsqueeze(0)
    cuts = find_cuts(
        logits_RV,
        torch.tensor([top_k], dtype=torch.int32, device=device),
        torch.tensor([top_p], dtype=torch.float64, device=device),
        torch.tensor([math.log(min_p) if min_p > 0 else -math.inf], dtype=torch.float32, device=device),
    )
    return cuts.is_kept_RV(logits_RV)[0].nonzero().squeeze(1)


@pytest.mark.parametrize(("num_values", "k"), TOP_K_CASES)
def test_top_k(device: torch.device, seed: int, num_values: int, k: int) -> None:
    values = top_k_cases.row(num_values, seed)
    actual = top_k_of_rows(values.to(device).unsqueeze(0), k)[0].cpu()
    assert torch.equal(actual, top_k_reference.top_k(values, k))


def test_top_k_of_values_of_all_kinds(device: torch.device) -> None:
    values = torch.tensor([0.0, -0.0, -torch.inf, 1e-45, -1e-45, torch.inf, -3.0, 3.0])
    for k in range(1, 9):
        assert torch.equal(top_k_of_rows(values.to(device).unsqueeze(0), k)[0].cpu(), top_k_reference.top_k(values, k))


@pytest.mark.parametrize(
    "spread", [pytest.param(0.0, marks=LONG_IF_INTERPRETED), pytest.param(0.01, marks=LONG_IF_INTERPRETED), 3.0]
)
@pytest.mark.parametrize("setting", filter_cases.SETTINGS)
def test_filter_logits(device: torch.device, seed: int, setting: tuple[int, float, float], spread: float) -> None:
    top_k, top_p, min_p = setting
    several_blocks = [] if IS_INTERPRETING and spread < 1 else [3000]
    for vocab_size in filter_cases.VOCAB_SIZES[:3] + several_blocks:
        logits = filter_cases.row(vocab_size, spread, seed)
        actual = filter_logits(logits.to(device), top_k=top_k, top_p=top_p, min_p=min_p).cpu()
        expected = filter_reference.filter_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p)
        assert torch.equal(actual, expected)


@settings(max_examples=20)
@given(
    vocab_size=st.integers(1, 400),
    num_levels=st.integers(1, 40),
    spread=st.floats(0.0, 200.0),
    top_k=st.integers(0, 500),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.floats(0.0, 1.0),
    near=st.integers(0, 17),
)
def test_filters_cut_at_the_token_of_the_reference(
    device: torch.device,
    vocab_size: int,
    num_levels: int,
    spread: float,
    top_k: int,
    top_p: float,
    min_p: float,
    near: int,
) -> None:
    """Also at values of `top_p` where one more unit in the last place takes one more token."""
    levels = filter_cases.row(num_levels, spread)
    logits = levels[torch.randint(0, num_levels, (vocab_size,), generator=torch.Generator().manual_seed(0))]
    cases = [
        (top_k, top_p, min_p),
        *((0, edge, 0.0) for edge in filter_cases.edges_of_nucleus(logits)[near : near + 1]),
    ]
    for k, p, least in cases:
        actual = filter_logits(logits.to(device), top_k=k, top_p=p, min_p=least).cpu()
        assert torch.equal(actual, filter_reference.filter_logits(logits, top_k=k, top_p=p, min_p=least))


@pytest.mark.parametrize(("vocab_size", "token_id", "num_top"), LOGPROBS_CASES)
def test_logprobs(device: torch.device, seed: int, vocab_size: int, token_id: int, num_top: int) -> None:
    logits = logprobs_cases.row(vocab_size, seed)
    rows, tokens = logits.to(device).unsqueeze(0), torch.tensor([token_id], device=device)
    own, rank, top_ids, top = logprobs_of_rows(rows, tokens, num_top)
    expected = logprobs_reference.logprobs(logits, token_id, num_top)
    assert (rank.item(), top_ids[0].tolist()) == (expected.rank, expected.top_token_ids)
    ours, theirs = [own.item(), *top[0].tolist()], [expected.token_logprob, *expected.top_logprobs]
    assert ours == pytest.approx(theirs, abs=logprobs_cases.TOLERANCE)
    assert torch.equal(logprobs_of_rows(rows, tokens, top_ids.flip(1))[3], top.flip(1))


def test_rows_do_not_depend_on_the_batch(device: torch.device, seed: int) -> None:
    logits = torch.stack([filter_cases.row(151, 1.0, seed + index) for index in range(4)]).to(device)
    tokens = torch.tensor([3, 150, 0, 77], device=device)
    whole = logprobs_of_rows(logits, tokens, 5)
    for row in range(4):
        alone = logprobs_of_rows(logits[row : row + 1], tokens[row : row + 1], 5)
        assert all(torch.equal(ours[0], ours_in_batch[row]) for ours, ours_in_batch in zip(alone, whole, strict=True))
