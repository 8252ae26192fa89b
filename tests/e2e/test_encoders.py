"""Encoders: hidden states equal those of `transformers`, and do not depend on the batch."""

from pathlib import Path

import pytest
import torch
from model_runner import Runner, facts_of, load
from pairwise import pairwise_first
from tiny_encoders import ENCODERS, MAX_POSITIONS, class_scores, hidden_states, make_encoder
from tiny_models import VOCAB_SIZE, make_tiny
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement

BATCHES = [[300, 1, 17, 32], [63, 64, 65, 2], [129, 128, 90, 3]]
"""Lengths of the texts of a step."""


def texts_of(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    return {name: make_encoder(name, root / name) for name in ENCODERS}


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_equal_transformers(
    name: str, directories: dict[str, Path], kernels: NativeLibrary | None
) -> None:
    path = directories[name]
    runner = Runner(load(path, torch.float32, kernels), torch.float32, max_len=MAX_POSITIONS)
    for lengths in BATCHES:
        texts = texts_of(lengths)
        actual = runner.step(texts, [(index, 0, length) for index, length in enumerate(lengths)])
        for mine, theirs in zip(actual, hidden_states(path, texts), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
            assert float(1 - torch.cosine_similarity(mine.mean(0), theirs.mean(0), dim=0)) < 1e-5


def test_second_texts_of_pairs_have_another_segment(
    directories: dict[str, Path], kernels: NativeLibrary | None
) -> None:
    path, texts = directories["bert"], texts_of([120, 90])
    runner = Runner(load(path, torch.float32, kernels), torch.float32, max_len=MAX_POSITIONS)
    actual = runner.step(texts, [(0, 0, 120), (1, 0, 90)], {0: 50})
    for mine, theirs in zip(actual, hidden_states(path, texts, [50, None]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name, (architecture, *_) in ENCODERS.items() if "Class" in architecture])
def test_class_scores_equal_transformers(name: str, directories: dict[str, Path]) -> None:
    path, (architecture, _, _) = directories[name], ENCODERS[name]
    model, (text,) = load(path, torch.float32, None), texts_of([50])
    rows = Runner(model, torch.float32, max_len=MAX_POSITIONS).step([text], [(0, 0, 50)])[0]
    model.pooling_head.prepare()
    expected = class_scores(path, architecture, text)
    vectors = rows if architecture.endswith("TokenClassification") else rows[:1]
    actual = torch.stack([torch.from_numpy(model.pooling_head(row.numpy())) for row in vectors])
    torch.testing.assert_close(actual, expected.view(actual.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kernels", "dtype"),
    pairwise_first(list(ENCODERS), ["torch", "native"], [torch.float32, torch.bfloat16]),
    indirect=["kernels"],
    ids=str,
)
def test_a_text_alone_has_the_bits_that_it_has_among_others(
    name: str, dtype: torch.dtype, directories: dict[str, Path], kernels: NativeLibrary | None
) -> None:
    runner = Runner(load(directories[name], dtype, kernels), dtype, max_len=MAX_POSITIONS)
    for lengths in BATCHES:
        texts = texts_of(lengths)
        parts = [(index, 0, length) for index, length in enumerate(lengths)]
        together = runner.step(texts, parts[::-1])[::-1]
        for part, rows in zip(parts, together, strict=True):
            assert bool(rows.isfinite().all())
            assert torch.equal(runner.step(texts, [part])[0], rows), part


def test_a_family_without_attention_in_both_directions_says_so(tmp_path: Path) -> None:
    path = make_tiny("GPT2Model", tmp_path, class_name="GPT2Config", n_embd=48, n_head=3, n_layer=1, is_causal=False)
    with pytest.raises(ConfigError, match="both directions, which GPT-2 does not have"):
        build_model(facts_of(path), Placement(torch.float32))
