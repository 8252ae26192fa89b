"""Encoders: hidden states equal those of `transformers`, and do not depend on the batch."""

from pathlib import Path

import pytest
import torch
import transformers
from model_runner import Runner, facts_of, filled, load, with_config
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


NOMIC = {
    "n_embd": 48,
    "n_head": 3,
    "n_inner": 96,
    "n_layer": 3,
    "n_positions": MAX_POSITIONS,
    "vocab_size": VOCAB_SIZE,
    "activation_function": "swiglu",
    "causal": False,
    "fused_bias_fc": True,
    "layer_norm_epsilon": 1e-12,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "pad_vocab_size_multiple": 64,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "model_type": "nomic_bert",
}
"""The keys of nomic-embed-text-v1.5."""


def test_nomic_bert_in_its_own_spelling(directories: dict[str, Path]) -> None:
    path, texts = directories["nomic-bert"], texts_of([60])
    facts = with_config(facts_of(path), NOMIC)
    runner = Runner(filled(build_model(facts, Placement(torch.float32)), path, None), torch.float32, MAX_POSITIONS)
    actual = runner.step(texts, [(0, 0, 60)])[0]
    torch.testing.assert_close(actual, hidden_states(path, texts)[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="'rotary_scaling_factor' is 2"):
        build_model(with_config(facts, {**NOMIC, "rotary_scaling_factor": 2}), Placement(torch.float32))


def test_the_scaling_of_gte_slows_all_angles(directories: dict[str, Path]) -> None:
    """The published formula (https://kexue.fm/archives/9706): the base times the factor, all over factor^(2 / dim)."""
    path, texts = directories["gte"], texts_of([60])
    facts = facts_of(path)
    config = {key: value for key, value in facts.hf_config.items() if key != "rope_parameters"}
    scaled = with_config(
        facts, {**config, "rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0}, "pack_qkv": True}
    )
    runner = Runner(filled(build_model(scaled, Placement(torch.float32)), path, None), torch.float32, MAX_POSITIONS)
    actual = runner.step(texts, [(0, 0, 60)])[0]
    theirs = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    theirs.rotary_emb.inv_freq = 160000.0 ** -(torch.arange(0, 16, 2) / 16) / 8 ** (2 / 16)
    with torch.inference_mode():
        expected = theirs(texts[0][None])[0][0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
