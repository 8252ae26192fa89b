"""Pooling from text to vectors: `LLM` and `AsyncClient` on tiny models, against transformers."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
import warm_python
from servers import Server, of_module, serve
from tiny_models import make_tiny

from octavo import LLM, AsyncClient, PoolingParams
from octavo.protocol.errors import InvalidRequestError

TEXTS = ["the fox", "one request, one batch, one block", "a", "the lazy dog tells the fox " * 12]
Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a decoder in the layout of Sentence Transformers: the mean of all tokens, normalized."""
    home = make_tiny("Qwen3ForCausalLM", tmp_path_factory.mktemp("embedder"))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (home / "modules.json").write_text(json.dumps(modules))
    (home / "1_Pooling").mkdir()
    (home / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return home


@pytest.fixture(scope="module")
def llm(embedder: Path) -> Iterator[LLM]:
    with LLM(str(embedder), dtype="float32", max_model_len=256, hf_overrides={"is_matryoshka": True}) as llm:
        yield llm


@torch.inference_mode()
def hidden_of(home: Path, token_ids: list[int]) -> Floats:
    reference = transformers.AutoModel.from_pretrained(home, dtype=torch.float32)
    output: Floats = reference(torch.tensor([token_ids])).last_hidden_state[0].double().numpy()
    return output


def unit(vector: Floats) -> Floats:
    return vector / np.linalg.norm(vector)


def test_embeddings(llm: LLM, embedder: Path) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt_token_ids == llm.get_tokenizer().encode(text)
        expected = unit(hidden_of(embedder, output.prompt_token_ids).mean(0))
        assert unit(np.array(output.outputs.embedding)) @ expected > 1 - 1e-5
        assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1, abs=1e-5)
    (alone,) = llm.embed(TEXTS[1], use_tqdm=False)
    assert alone.outputs == outputs[1].outputs, "the bits of a vector depend on its text alone"
    (short,) = llm.embed(TEXTS[1], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    assert unit(np.array(short.outputs.embedding)) == pytest.approx(unit(np.array(outputs[1].outputs.embedding[:8])))


def test_scores_and_vectors_of_tokens(llm: LLM) -> None:
    vectors = [np.array(output.outputs.embedding) for output in llm.embed(TEXTS[:3], use_tqdm=False)]
    scores = llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False)
    assert [one.outputs.score for one in scores] == pytest.approx([vectors[0] @ other for other in vectors[1:]])
    (tokens,) = llm.encode(TEXTS[0], pooling_task="token_embed", use_tqdm=False)
    assert tokens.outputs.data.shape == (len(tokens.prompt_token_ids), 48)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("a"), "is a pooling model and generates no text"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}]), "is a pooling model and generates no text"),
        (lambda llm: llm.classify("a"), "does not compute classify"),
        (lambda llm: llm.embed(["a", "b" * 600]), r"prompt\[1\] has .* tokens"),
        (lambda llm: llm.embed(["a", "b"], pooling_params=[PoolingParams()]), "1 entries for 2 prompts"),
    ],
)
def test_calls_that_are_refused(llm: LLM, call, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        call(llm)


def test_a_generating_engine_has_no_vectors(model: Path) -> None:
    async def main() -> None:
        async with AsyncClient.launch(str(model), dtype="float32", max_model_len=64) as client:
            with pytest.raises(InvalidRequestError, match="generates text; it computes no embeddings"):
                await client.embed(["a"])

    asyncio.run(main())


def test_classes_and_rewards(tmp_path: Path) -> None:
    """A classifier of transformers, through `AsyncClient`; its head gives scores of tokens too."""
    home = make_tiny("Qwen3ForSequenceClassification", tmp_path, class_name="Qwen3Config", num_labels=3, **SMALL)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(home, dtype=torch.float32)

    async def main() -> None:
        async with AsyncClient.launch(str(home), dtype="float32", max_model_len=128) as client:
            outputs = await client.classify(TEXTS[:3])
            raw = [one async for one in client.encode(TEXTS[0], PoolingParams(use_activation=False))]
            (rewards,) = await client.reward(TEXTS[:1], PoolingParams(use_activation=False))
        for output in outputs:
            with torch.inference_mode():
                logits = reference(torch.tensor([output.prompt_token_ids])).logits[0]
            assert output.outputs.probs == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
            assert output.outputs.num_classes == 3
        with torch.inference_mode():
            logits = reference(torch.tensor([outputs[0].prompt_token_ids])).logits[0]
        assert raw[0].outputs.data == pytest.approx(logits.numpy(), abs=1e-5)
        assert rewards.outputs.data[-1] == pytest.approx(raw[0].outputs.data, abs=1e-5)

    asyncio.run(main())


SMALL = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def core_of(server: Server) -> int:
    (core,) = of_module(server.process.pid, "octavo.core_proc")
    return core


def test_a_server_outlives_its_core_and_batch_files_have_vectors(embedder: Path, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--max-model-len", "256", "--served-model-name", "tiny")
    texts = [f"text {index} of many" for index in range(300)]
    with serve(embedder, *flags) as server:
        server.wait_until_ready()

        def embed() -> list[list[float]]:
            answer = server.post("/v1/embeddings", {"model": "tiny", "input": texts}).json()
            return [one["embedding"] for one in answer["data"]]

        before = embed()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(embed)
            os.kill(core_of(server), signal.SIGKILL)
            assert call.result() == before
        ranked = server.post("/rerank", {"query": texts[7], "documents": texts[5:10], "top_n": 1}).json()
        assert ranked["results"][0]["index"] == 2
    lines = [
        {"custom_id": f"c{index}", "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for index, text in enumerate(texts[:2])
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["-m", "octavo", "run-batch", str(embedder), *flags, "-i", str(source), "-o", str(out)]
    warm_python.run(words, check=True, timeout=120)
    results = {entry["custom_id"]: entry for entry in map(json.loads, out.read_text().splitlines())}
    for index in range(2):
        assert results[f"c{index}"]["response"]["body"]["data"][0]["embedding"] == before[index]
