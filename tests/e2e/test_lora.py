"""Engines with LoRA adapters: equal to peft's merged weights, the same bits in any batch, across loads and deaths."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import write_adapter
from servers import descendants, serve
from waiting import until

from octavo import LLM, AsyncClient, LoRARequest, RequestOutput, SamplingParams
from octavo.protocol.errors import InvalidRequestError

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 16,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_logprobs": -1,
}
PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 17, 60)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
LONG = PARAMS.clone(max_tokens=60)
KINDS: list[dict[str, Any]] = [{}, {"r": 16, "use_rslora": True}, {"r": 3, "target_modules": ["q_proj", "down_proj"]}]


@pytest.fixture(scope="module")
def merged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """Return adapters, each with the model that it is merged into."""
    directory = tmp_path_factory.mktemp("adapters")
    paths = [directory / str(index) for index in range(len(KINDS))]
    return {path: write_adapter(model, path, seed, **KINDS[seed]) for seed, path in enumerate(paths)}


@pytest.fixture(scope="module")
def requests(merged: dict[Path, Any]) -> list[LoRARequest | None]:
    return [None, *(LoRARequest(path.name, index, str(path)) for index, path in enumerate(merged, 1))]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


def result(output: RequestOutput) -> tuple[list[int], list[float]]:
    """Return the tokens and the bits of their logprobs."""
    (choice,) = output.outputs
    logprobs = [position[token].logprob for token, position in zip(choice.token_ids, choice.logprobs, strict=True)]
    return list(choice.token_ids), logprobs


def test_logprobs_are_those_of_merged_weights(llm: LLM, merged: dict[Path, Any], requests: list[Any]) -> None:
    base = result(llm.generate(PROMPTS[1], PARAMS)[0])
    for request, weights in zip(requests[1:], merged.values(), strict=True):
        tokens, logprobs = result(llm.generate(PROMPTS[1], PARAMS, lora_request=request)[0])
        with torch.inference_mode():
            logits = weights(torch.tensor([PROMPTS[1] + tokens])).logits[0, len(PROMPTS[1]) - 1 : -1]
        expected = logits.log_softmax(1)[range(len(tokens)), tokens]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)
        assert logprobs != base[1]


def test_bits_do_not_depend_on_the_adapters_of_others(llm: LLM, requests: list[Any]) -> None:
    pairs = [(prompt, request) for prompt in PROMPTS for request in requests]
    alone = [result(llm.generate(prompt, PARAMS, lora_request=request)[0]) for prompt, request in pairs]
    llm.reset_prefix_cache()
    prompts, adapters = zip(*pairs, strict=True)
    together = llm.generate(list(prompts), PARAMS, lora_request=list(adapters))
    assert [result(output) for output in together] == alone
    scored = llm.score_tokens(list(prompts), [tokens for tokens, _ in alone], lora_request=list(adapters))
    assert scored == [logprobs for _, logprobs in alone]


def test_a_reloaded_name_never_meets_stale_keys(llm: LLM, merged: dict[Path, Any], tmp_path: Path, requests) -> None:
    first, second, path = *list(merged)[:2], tmp_path / "changing"
    expected = [result(llm.generate(PROMPTS[3], PARAMS, lora_request=request)[0]) for request in requests[1:3]]
    shutil.copytree(first, path)
    request = LoRARequest("changing", 10, str(path))
    shared = llm.generate(PROMPTS[3], PARAMS, lora_request=request)[0]
    assert result(shared) == expected[0] and shared.num_cached_tokens, "equal contents share the cache"
    llm.reset_prefix_cache()
    llm.generate(PROMPTS[3], PARAMS, lora_request=request)
    shutil.copytree(second, path, dirs_exist_ok=True)
    inplace = LoRARequest("changing", 10, str(path), load_inplace=True)
    reloaded = llm.generate(PROMPTS[3], PARAMS, lora_request=inplace)[0]
    assert result(reloaded) == expected[1] and not reloaded.num_cached_tokens


def test_files_that_have_changed_since_end_only_their_own_request(
    llm: LLM, merged: dict[Path, Any], tmp_path: Path, requests: list[Any]
) -> None:
    path = shutil.copytree(next(iter(merged)), tmp_path / "changed")
    settings = path / "adapter_config.json"
    settings.write_text(settings.read_text() + " ")
    lost = LoRARequest("lost", 20, str(path))
    llm._run(llm.client.adapters.of_request(lost))
    shutil.rmtree(path)
    with pytest.raises(InvalidRequestError, match="changed"):
        llm.generate(PROMPTS[0], PARAMS, lora_request=lost)
    assert llm.generate(PROMPTS[0], PARAMS, lora_request=requests[1])[0].finished


def test_an_adapter_of_another_model_is_refused_by_its_tensor(llm: LLM, tmp_path: Path) -> None:
    from adapter_files import write_adapter as write_square_adapter

    path = write_square_adapter(tmp_path / "other", width=8)
    with pytest.raises(InvalidRequestError, match=r"q_proj.lora_A.weight.*another model"):
        llm.generate(PROMPTS[0], PARAMS, lora_request=LoRARequest("other", 30, str(path)))


def test_adapters_are_loaded_again_after_deaths(model: Path, requests: list[Any]) -> None:
    async def ask(client: AsyncClient, prompt: list[int], request: LoRARequest | None) -> Any:
        tokens: list[int] = []
        async for output in client.generate(prompt, LONG, lora_request=request):
            tokens += output.outputs[0].token_ids
        return tokens

    async def ask_all(client: AsyncClient) -> list[Any]:
        return await asyncio.gather(*(ask(client, prompt, one) for prompt in PROMPTS[:2] for one in requests))

    async def use() -> None:
        # Native kernels would be done before this process has killed anybody.
        async with AsyncClient.launch(str(model), **SETTINGS, cpu_kernels="torch") as client:
            expected = await ask_all(client)
            assert client.engine is not None
            for victim in ("worker", "core"):
                await client.reset_prefix_cache()
                core = client.engine.core_pid
                pid = core if victim == "core" else descendants(core)[-1]
                steps = (await client.engine_stats()).num_steps
                running = asyncio.create_task(ask_all(client))
                await until(lambda seen=steps: client.latest_stats.num_steps > seen + 5)
                os.kill(pid, signal.SIGKILL)
                assert await running == expected

    asyncio.run(use())


@pytest.mark.long
@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size"])
def test_several_workers(llm: LLM, model: Path, requests: list[Any], name: str) -> None:
    prompts, adapters = zip(*((prompt, request) for prompt in PROMPTS for request in requests), strict=True)
    expected = [result(one) for one in llm.generate(list(prompts), PARAMS, lora_request=list(adapters))]
    memory = 16 << 20
    with LLM(str(model), **SETTINGS, **{name: 2}, num_threads=1, kv_cache_memory_bytes=memory) as several:
        found = [result(one) for one in several.generate(list(prompts), PARAMS, lora_request=list(adapters))]
    assert found == expected


@pytest.mark.long
def test_a_batch_file_names_adapters(model: Path, merged: dict[Path, Any], tmp_path: Path) -> None:
    first = next(iter(merged))
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"model": name, "prompt": PROMPTS[1], "max_tokens": 4, "temperature": 0} for name in ("first", "other")]
    lines = [{"custom_id": one["model"], "method": "POST", "url": "/v1/completions", "body": one} for one in bodies]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--enable-lora", "--lora-modules", f"first={first}", "--dtype", "float32", "--max-model-len", "256"]
    words = [sys.executable, "-P", "-m", "octavo", "run-batch", str(model), "-i", source, "-o", results, *flags]
    subprocess.run(words, check=True, capture_output=True)
    codes = {
        line["custom_id"]: line["response"]["status_code"] for line in map(json.loads, results.read_text().splitlines())
    }
    assert codes == {"first": 200, "other": 404}


def test_all_processes_of_a_server_have_the_same_adapters(model: Path, merged: dict[Path, Any], tmp_path: Path) -> None:
    first, second, third = merged
    shutil.copytree(third, tmp_path / "team" / "third")
    flags = ["--enable-lora", "--max-loras", "1", "--dtype", "float32", "--max-model-len", "256"]
    flags += ["--allow-runtime-lora-updating", "--lora-resolver-dir", str(tmp_path), "--api-server-count", "2"]
    with serve(model, *flags, "--lora-modules", f"first={first}", "--served-model-name", "tiny") as server:
        server.wait_until_ready()

        def texts(name: str) -> set[str]:
            body = {"model": name, "prompt": PROMPTS[1], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answers = [server.post("/v1/completions", body) for _ in range(6)]
            assert all(answer.status_code == 200 for answer in answers), answers[0].text
            return {answer.json()["choices"][0]["text"] for answer in answers}

        added = server.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": str(second)})
        assert added.status_code == 200
        found = [texts(name) for name in ("tiny", "first", "second", "team/third")]
        assert all(len(one) == 1 for one in found) and len(set.union(*found)) == 4
        names = [{card["id"] for card in server.get("/v1/models").json()["data"]} for _ in range(6)]
        assert all(one == {"tiny", "first", "second", "team/third"} for one in names)
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 200
        body = {"model": "second", "prompt": "x"}
        assert {server.post("/v1/completions", body).status_code for _ in range(6)} == {404}
