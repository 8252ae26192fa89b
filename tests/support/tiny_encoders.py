"""Tiny encoders, and the hidden states that `transformers` computes with them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import VOCAB_SIZE, make_tiny
from torch import Tensor

MAX_POSITIONS = 304
_BERT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
}
_ROBERTA = {**_BERT, "max_position_embeddings": MAX_POSITIONS + 2, "pad_token_id": 1, "type_vocab_size": 1}
_MODERN = {**_BERT, "num_hidden_layers": 4, "local_attention": 40}
_DISTIL = {
    "vocab_size": VOCAB_SIZE,
    "dim": 48,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 3,
    "max_position_embeddings": MAX_POSITIONS,
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", {**_BERT, "num_attention_heads": 6}),
    "bert-masked": ("BertForMaskedLM", "BertConfig", _BERT),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", {**_BERT, "hidden_act": "gelu_new"}),
    "bert-tokens": ("BertForTokenClassification", "BertConfig", {**_BERT, "num_labels": 5}),
    "roberta": ("RobertaModel", "RobertaConfig", _ROBERTA),
    "roberta-classes": ("RobertaForSequenceClassification", "RobertaConfig", {**_ROBERTA, "num_labels": 3}),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", _ROBERTA),
    "modernbert": ("ModernBertModel", "ModernBertConfig", _MODERN),
    "modernbert-classes": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**_MODERN, "num_labels": 3, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "nomic-bert": ("NomicBertModel", "NomicBertConfig", _BERT),
    "gte": ("GteModel", "GteConfig", {**_BERT, "type_vocab_size": 1}),
    "gte-classes": ("GteForSequenceClassification", "GteConfig", {**_BERT, "type_vocab_size": 0, "num_labels": 1}),
    "distilbert-classes": ("DistilBertForSequenceClassification", "DistilBertConfig", {**_DISTIL, "num_labels": 4}),
    "qwen2-both-ways": (
        "Qwen2Model",
        "Qwen2Config",
        {**_BERT, "num_attention_heads": 6, "num_key_value_heads": 2, "is_causal": False},
    ),
    "embedding-gemma": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {
            **_BERT,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 40,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_bidirectional_attention": True,
        },
    ),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        _DISTIL,
    ),
}


def make_encoder(name: str, directory: Path) -> Path:
    """Write one of `ENCODERS`."""
    architecture, config, settings = ENCODERS[name]
    return make_tiny(architecture, directory, class_name=config, **settings)


def class_scores(path: Path, architecture: str, text: Tensor) -> Tensor:
    """Return the logits that `transformers` computes for one text, in float32."""
    theirs = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return theirs(text[None], attention_mask=torch.ones_like(text)[None]).logits[0]


def hidden_states(path: Path, texts: list[Tensor], segment_starts: list[int | None] | None = None) -> list[Tensor]:
    """Return what `transformers` computes, one text at a time, in float32.

    `segment_starts`: where the second text of a pair begins.
    """
    theirs = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    results = []
    for index, tokens in enumerate(texts):
        options = {"attention_mask": torch.ones_like(tokens)[None]}
        if theirs.config.get_text_config().to_dict().get("is_causal") is False:  # a causal model in other use
            options["attention_mask"] = torch.zeros(1, 1, len(tokens), len(tokens))
        if segment_starts and (start := segment_starts[index]) is not None:
            options["token_type_ids"] = (torch.arange(len(tokens)) >= start).long()[None]
        with torch.inference_mode():
            results.append(theirs(tokens[None], **options)[0][0])
    return results
