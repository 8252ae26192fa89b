"""Pairs, late interaction, rewards of steps and rerankers over HTTP, with real engines, against transformers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from http_client import http_client
from safetensors.torch import load_file, save_file
from tiny_encoders import ENCODERS
from tiny_models import make_tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from octavo import AsyncClient

QUERY, DOCUMENTS = "the lazy fox", ["a quick dog", "the fox", "one block of one batch tells the dog a"]
WORDS = sorted({word for text in (QUERY, *DOCUMENTS) for word in text.split()})
SMALL = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20}


def answers(model: Path, *calls: tuple[str, dict[str, Any]], **settings: Any) -> list[Any]:
    """Return the bodies that an engine's HTTP application answers."""

    async def ask() -> list[Any]:
        async with AsyncClient.launch(str(model), **SETTINGS, **settings) as client, http_client(client) as http:
            responses = [await http.post(path, json=body) for path, body in calls]
        for response in responses:
            assert response.status_code == 200, response.text
        return [response.json() for response in responses]

    return asyncio.run(ask())


def scores_of(answer: Any) -> list[float]:
    return [entry["score"] for entry in answer["data"]]


def assert_ranked(answer: Any, expected: list[float]) -> None:
    """Check a ranking of `DOCUMENTS`."""
    order = np.argsort(expected)[::-1].tolist()
    assert [entry["index"] for entry in answer["results"]] == order
    assert [entry["document"]["text"] for entry in answer["results"]] == [DOCUMENTS[index] for index in order]
    actual = [entry["relevance_score"] for entry in answer["results"]]
    assert actual == pytest.approx([expected[index] for index in order], abs=1e-5)


@pytest.fixture
def cross_encoder(tmp_path: Path) -> Path:
    """Return a BERT with one class, whose tokenizer writes pairs as [CLS] a [SEP] b [SEP] with two segments."""
    settings = {**ENCODERS["bert"][2], "num_labels": 1}
    home = make_tiny("BertForSequenceClassification", tmp_path, class_name="BertConfig", **settings)
    vocab = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(home / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 256, **names}
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    return home


def test_a_cross_encoder_reads_pairs(cross_encoder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(cross_encoder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(cross_encoder, dtype=torch.float32)
    with torch.inference_mode():
        pairs = [tokenizer(QUERY, text, return_tensors="pt") for text in DOCUMENTS]
        assert all(pair["token_type_ids"].sum() > 1 for pair in pairs)
        expected = [float(model(**pair).logits.sigmoid()) for pair in pairs]
    assert len({round(score, 3) for score in expected}) == 3
    scored, paired, ranked = answers(
        cross_encoder,
        ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/score", {"text_1": [QUERY] * 2, "text_2": DOCUMENTS[1:]}),
        ("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}),
    )
    assert scores_of(scored) == pytest.approx(expected, abs=1e-5)
    assert scores_of(paired) == scores_of(scored)[1:], "the bits of a pair depend on it alone"
    assert scored["usage"]["prompt_tokens"] == sum(pair["input_ids"].numel() for pair in pairs)
    assert_ranked(ranked, expected)


@torch.inference_mode()
def unit_vectors(model: Path, text: str) -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    hidden_TD: Tensor = reference(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden_TD, dim=-1)


def test_late_interaction_adds_the_largest_products_of_tokens(tmp_path: Path) -> None:
    home = make_tiny("Qwen3ForCausalLM", tmp_path)
    query_TD = unit_vectors(home, QUERY)
    expected = [float((query_TD @ unit_vectors(home, text).T).max(1).values.sum()) for text in DOCUMENTS]
    scored, ranked, vectors = answers(
        home,
        ("/score", {"queries": QUERY, "documents": DOCUMENTS}),
        ("/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}),
        ("/pooling", {"input": QUERY, "task": "token_embed"}),
        runner="pooling",
        pooler_config={"task": "token_embed"},
    )
    assert scores_of(scored) == pytest.approx(expected, abs=1e-4)
    assert_ranked(ranked, expected)
    np.testing.assert_allclose(np.array(vectors["data"][0]["data"]), query_TD.numpy(), atol=1e-5)


def test_a_process_reward_model_scores_steps(tmp_path: Path) -> None:
    """In the layout of Qwen2.5-Math-PRM: a head of two layers, whose result counts at the tokens that end steps."""
    settings = {**SMALL, "num_labels": 2, "pad_token_id": 0}
    home = make_tiny("Qwen2ForTokenClassification", tmp_path, class_name="Qwen2Config", **settings)
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForProcessRewardModel"]}))
    weights = load_file(home / "model.safetensors")
    backbone = {name: weight for name, weight in weights.items() if not name.startswith("score.")}
    generator = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (48, 48), "0.bias": (48,), "2.weight": (2, 48), "2.bias": (2,)}
    head = {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file({**backbone, **{f"score.{name}": weight for name, weight in head.items()}}, home / "model.safetensors")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    token_ids = tokenizer.encode("the fox, the dog, the fox")
    tag = next(token for token in token_ids if token_ids.count(token) > 1)
    model = transformers.Qwen2Model.from_pretrained(home, dtype=torch.float32)
    with torch.inference_mode():
        hidden_TD = model(torch.tensor([token_ids])).last_hidden_state[0]
        hidden_SD = hidden_TD[torch.tensor(token_ids) == tag]
        inner_SD = (hidden_SD @ head["0.weight"].T + head["0.bias"]).relu()
        expected = (inner_SD @ head["2.weight"].T + head["2.bias"]).softmax(-1)
    (answer,) = answers(
        home,
        ("/pooling", {"input": "the fox, the dog, the fox", "use_activation": True}),
        pooler_config={"step_tag_id": tag},
    )
    np.testing.assert_allclose(np.array(answer["data"][0]["data"]), expected.numpy(), atol=1e-5)


TEMPLATE = (
    "{{ instruction | default('relevance') }}: "
    "{{ (messages | selectattr('role', 'eq', 'query') | first).content }} / "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }} answer"
)


@pytest.fixture
def reranker(tmp_path: Path) -> Iterator[Path]:
    yield make_tiny("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=True)


def test_a_reranker_is_two_logits_of_a_template(reranker: Path) -> None:
    """As Qwen3-Reranker: the instruction and both texts in a template, then "no" or "yes"."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(reranker)
    model = transformers.AutoModelForCausalLM.from_pretrained(reranker, dtype=torch.float32)
    no, yes = "a", "o"
    chosen = torch.tensor([tokenizer.convert_tokens_to_ids(token) for token in (no, yes)])

    @torch.inference_mode()
    def expected(instruction: str) -> list[float]:
        texts = [f"{instruction}: {QUERY} / {text} answer" for text in DOCUMENTS]
        logits = [model(torch.tensor([tokenizer.encode(text)])).logits[0, -1, chosen] for text in texts]
        return [float(one.softmax(0)[1]) for one in logits]

    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": [no, yes],
        "is_original_qwen3_reranker": True,
    }
    plain, instructed, ranked = answers(
        reranker,
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS, "chat_template_kwargs": {"instruction": "find it"}}),
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": True, "instruction": "find it"}),
        hf_overrides=overrides,
        chat_template=TEMPLATE,
    )
    assert scores_of(plain) == pytest.approx(expected("relevance"), abs=1e-5)
    assert scores_of(instructed) == pytest.approx(expected("find it"), abs=1e-5)
    assert_ranked(ranked, expected("find it"))
