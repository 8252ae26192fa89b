"""A real embedding model, all-MiniLM-L6-v2, against transformers on the same weights."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from servers import Server, serve

PAIRS = [
    ("How do I reset my password?", "Steps to recover a forgotten login"),
    ("How do I reset my password?", "The weather is nice today."),
    ("A cat sits on the mat.", "A kitten rests on a rug."),
    ("A cat sits on the mat.", "Stock markets fell sharply on Monday."),
    ("Sorting a list in Python", "How to order the elements of an array"),
    ("Sorting a list in Python", "Boil the pasta for ten minutes, caf\u00e9 style \u2615"),
    ("What is the capital of France?", "Paris is the capital and largest city of France."),
    ("What is the capital of France?", "Berlin is the capital of Germany."),
    ("What is the capital of France?", " ".join(["Lyon is a city in France."] * 30)),
]
TEXTS = list(dict.fromkeys(text for pair in PAIRS for text in pair))
Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def server(minilm: Path) -> Iterator[Server]:
    with serve(minilm, "--dtype", "float32", "--served-model-name", "minilm") as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def reference(minilm: Path) -> dict[str, Floats]:
    """Means of hidden states, of length 1, as the files of Sentence Transformers ask for."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm, dtype=torch.float32)
    vectors = {}
    for text in TEXTS:
        with torch.inference_mode():
            hidden_TD = model(**tokenizer(text, truncation=True, max_length=256, return_tensors="pt"))[0][0]
        vectors[text] = torch.nn.functional.normalize(hidden_TD.mean(0), dim=0).double().numpy()
    return vectors


def embedded(server: Server, texts: list[str]) -> list[Floats]:
    answer = server.post("/v1/embeddings", {"model": "minilm", "input": texts}).json()
    assert [entry["index"] for entry in answer["data"]] == list(range(len(texts)))
    return [np.array(entry["embedding"]) for entry in answer["data"]]


def test_vectors_are_those_of_transformers(server: Server, reference: dict[str, Floats]) -> None:
    for text, vector in zip(TEXTS, embedded(server, TEXTS), strict=True):
        assert 1 - vector @ reference[text] < 1e-5, text


def test_pairs_are_ranked_as_by_the_reference(server: Server, reference: dict[str, Floats]) -> None:
    vectors = dict(zip(TEXTS, embedded(server, TEXTS), strict=True))
    ours = [float(vectors[first] @ vectors[second]) for first, second in PAIRS]
    theirs = [float(reference[first] @ reference[second]) for first, second in PAIRS]
    assert np.argsort(ours).tolist() == np.argsort(theirs).tolist()
    body = {"model": "minilm", "query": PAIRS[6][0], "documents": [second for _, second in PAIRS[6:]]}
    ranked = server.post("/rerank", body).json()["results"]
    assert [result["index"] for result in ranked] == np.argsort([-score for score in theirs[6:]]).tolist()
    np.testing.assert_allclose([result["relevance_score"] for result in ranked], sorted(theirs[6:])[::-1], atol=1e-5)


def test_a_vector_does_not_depend_on_the_call(server: Server) -> None:
    together = embedded(server, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        (alone,) = embedded(server, [text])
        assert alone.tolist() == vector.tolist(), text


def test_a_text_beyond_the_limit_is_refused_or_cut(server: Server) -> None:
    long = "water " * 600
    refused = server.post("/v1/embeddings", {"model": "minilm", "input": ["short", long]})
    assert refused.status_code == 400 and "256" in refused.text
    cut = server.post("/v1/embeddings", {"model": "minilm", "input": [long], "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 256
