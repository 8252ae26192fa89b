"""Engines that pool, over real processes: deaths, adapters, changed weights, several ranks, quantized weights."""

import asyncio
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft_adapters import write_adapter
from quantized_checkpoints import write
from safetensors.torch import load_file, save_file
from servers import of_module
from tiny_encoders import make_encoder
from tiny_models import make_tiny
from waiting import until

from octavo import LLM, AsyncClient, LoRARequest
from octavo.frontend.pooling.result import PooledResult
from octavo.protocol.errors import InvalidRequestError, RequestFailedError
from octavo.protocol.pooling import PoolingTask

TEXTS = ["the fox", "one request, one batch, one block", "a", "the lazy dog tells the fox " * 8]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20}
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 512}
MODELS = ("embedding", "classifier", "bert")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pooling")
    embedding = make_tiny("Qwen3Model", root / "embedding", class_name="Qwen3Config", vocab_size=320, **WIDE, **SMALL)
    head = {"num_labels": 3, "pad_token_id": 0}
    name = "Qwen3ForSequenceClassification"
    classifier = make_tiny(name, root / "classifier", class_name="Qwen3Config", vocab_size=320, **WIDE, **SMALL, **head)
    return {"embedding": embedding, "classifier": classifier, "bert": make_encoder("bert", root / "bert")}


SMALL = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256}


def bits(results: list[PooledResult]) -> list[tuple[bytes, Any]]:
    return [(bytes(one.pooled.data.data), one.pooled.shape) for one in results]


def compute(llm: LLM, lora_request: LoRARequest | None = None) -> list[PooledResult]:
    """Return the results of the model's usual task."""
    return llm._run(llm.client.pool(TEXTS, lora_request=lora_request))


def cosine(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def processes(client: AsyncClient, module: str) -> list[int]:
    assert client.engine is not None
    core = client.engine.core_pid
    return [core] if module == "octavo.core_proc" else of_module(core, module)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("embedding", "embed"),
        pytest.param("embedding", "token_embed", marks=pytest.mark.long),
        pytest.param("classifier", "classify", marks=pytest.mark.long),
        pytest.param("bert", "embed", marks=pytest.mark.long),
    ],
)
def test_texts_outlive_workers_and_cores(name: str, task: PoolingTask, models: dict[str, Path]) -> None:
    texts = [f"{TEXTS[index % 4]} {index}" for index in range(600)]

    async def main() -> None:
        async with AsyncClient.launch(str(models[name]), **SETTINGS, max_num_seqs=4) as client:
            expected = bits(await client.pool(texts, task=task))
            for module in ("octavo.worker_proc", "octavo.core_proc"):
                done: list[int] = []
                call = asyncio.create_task(client.pool(texts, task=task, on_progress=done.append))
                await until(lambda done=done: sum(done) > 8)
                assert not call.done()
                os.kill(processes(client, module)[0], signal.SIGKILL)
                assert bits(await call) == expected
                assert sum(done) == len(texts), "each text is answered once"

    asyncio.run(main())


def test_adapters_of_peft_are_for_the_requests_that_name_them(models: dict[str, Path], tmp_path: Path) -> None:
    merged = write_adapter(models["embedding"], tmp_path, task_type="FEATURE_EXTRACTION", target_modules="all-linear")
    with LLM(str(models["embedding"]), **SETTINGS, enable_lora=True) as llm:
        plain = compute(llm)

        async def mixed() -> list[list[PooledResult]]:
            adapters = (LoRARequest("a", 1, str(tmp_path)), None)
            return await asyncio.gather(
                *[llm.client.pool([text], lora_request=one) for text in TEXTS for one in adapters]
            )

        results = llm._run(mixed())
    assert bits([one for (one,) in results[1::2]]) == bits(plain)
    for (adapted,), own in zip(results[::2], plain, strict=True):
        with torch.inference_mode():
            theirs = merged.model(torch.tensor([list(adapted.token_ids)])).last_hidden_state[0, -1]
        assert cosine(adapted.array(), theirs) > 1 - 1e-5
        assert cosine(adapted.array(), own.array()) < 1 - 1e-4


def changed(model: Path, folder: Path) -> Path:
    """Write a checkpoint with other weights, those of the head included."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    noise = torch.Generator().manual_seed(4)
    tensors = load_file(model / "model.safetensors")
    others = {name: tensor * (1 + 0.3 * torch.rand(tensor.shape, generator=noise)) for name, tensor in tensors.items()}
    save_file(others, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["classifier", *(pytest.param(name, marks=pytest.mark.long) for name in MODELS[::2])])
def test_weights_change_and_sleep(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    other = changed(models[name], tmp_path / "other")
    with LLM(str(other), **SETTINGS) as fresh:
        expected = bits(compute(fresh))
    with LLM(str(models[name]), **SETTINGS) as llm:
        before = bits(compute(llm))
        llm.update_weights(str(other))
        assert bits(compute(llm)) == expected != before
        llm.update_weights(load_file(models[name] / "model.safetensors"))
        assert bits(compute(llm)) == before
        llm.sleep(1)
        llm.wake_up()
        assert bits(compute(llm)) == before


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_ranks_stages_and_engines_give_the_bits_of_one(name: str, models: dict[str, Path]) -> None:
    with LLM(str(models[name]), **SETTINGS) as alone:
        expected = bits(compute(alone))
    for flag in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        with LLM(str(models[name]), **SETTINGS, **{flag: 2}, num_threads=1) as llm:
            assert bits(compute(llm)) == expected, flag


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS[::2])
@pytest.mark.parametrize("kind", ["int8", "int4", "w8a8", "gptq-8", "gptq", "float16", "cache"])
def test_smaller_weights_and_caches_give_similar_vectors(
    name: str, kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    path, settings = models[name], dict(SETTINGS)
    match kind:
        case "gptq-8" | "gptq":
            write(kind, path, path := tmp_path / "quantized")
        case "float16":
            settings["dtype"] = kind
        case "cache":
            settings["kv_cache_dtype"] = "int8"
        case _:
            settings["quantization"] = kind
    with LLM(str(models[name]), **SETTINGS) as plain, LLM(str(path), **settings) as small:
        pairs = zip(compute(plain), compute(small), strict=True)
        assert min(cosine(a.array(), b.array()) for a, b in pairs) > (0.8 if kind in ("int4", "gptq") else 0.98)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS[::2])
def test_numbers_that_are_none_fail_their_request_alone(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    broken = changed(models[name], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    (table,) = (name for name in tensors if name.endswith(("embed_tokens.weight", "word_embeddings.weight")))
    tensors[table][7] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    with LLM(str(broken), **SETTINGS) as llm:
        prompts = [{"prompt_token_ids": [5] * 40 + [7] * (index % 2)} for index in range(8)]
        (alone,) = bits(llm._run(llm.client.pool(prompts[:1])))

        async def each() -> list[Any]:
            return await asyncio.gather(*[llm.client.pool([one]) for one in prompts], return_exceptions=True)

        results = llm._run(each())
    assert [bits(one) for one in results[::2]] == [[alone]] * 4
    assert all(isinstance(one, RequestFailedError) and "NaN or infinite" in str(one) for one in results[1::2])


def test_adapters_that_replace_the_head_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    import peft  # seconds

    base = transformers.AutoModelForSequenceClassification.from_pretrained(models["classifier"])
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])  # saves the head too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
        peft.get_peft_model(base, config).save_pretrained(str(tmp_path))
    with (
        LLM(str(models["classifier"]), **SETTINGS, enable_lora=True) as llm,
        pytest.raises(InvalidRequestError, match="modules_to_save"),
    ):
        compute(llm, LoRARequest("a", 1, str(tmp_path)))
