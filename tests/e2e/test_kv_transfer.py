"""KV blocks move from a prefill engine to a decode engine: the same bits, whatever happens on the way."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from servers import descendants, serve

from octavo import LLM, AsyncClient, SamplingParams
from octavo.frontend.cli.main import main

PROMPT = [number % 90 + 1 for number in range(100)]
SETTINGS: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 100, "max_num_seqs": 4}
REMOTE_DECODE = {"kv_transfer_params": {"do_remote_decode": True}}


def transfer(role: str, **fields: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "OctavoConnector", "kv_role": role, **fields}}


def prefill(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Compute a prompt, and return how another engine goes on."""
    params = SamplingParams(max_tokens=1, extra_args=REMOTE_DECODE)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(llm: LLM, prompt: list[int], kv_transfer_params: dict[str, Any] | None, n: int = 1) -> tuple[Any, int]:
    """Return tokens and logprobs of continuations, and how much of the prompt was not computed for them."""
    extra_args = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
    params = SamplingParams(
        max_tokens=16, n=n, seed=5, temperature=1.0, ignore_eos=True, logprobs=2, extra_args=extra_args
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    answers = []
    for answer in output.outputs:
        assert answer.logprobs is not None
        logprobs = [{token: logprob.logprob for token, logprob in position.items()} for position in answer.logprobs]
        answers.append((answer.token_ids, logprobs))
    return answers, output.num_cached_tokens


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[tuple[LLM, LLM]]:
    """Return an engine that gives blocks and one that takes them."""
    with ExitStack() as stack:
        roles = ("kv_producer", "kv_consumer")
        first, second = (
            stack.enter_context(LLM(str(model), dtype="float32", **SETTINGS, **transfer(role))) for role in roles
        )
        yield first, second


def core_pid(llm: LLM) -> int:
    assert llm.client.engine is not None
    return llm.client.engine.core_pid


@pytest.mark.parametrize("n", [1, 3])
def test_a_decode_engine_continues_with_the_bits_of_one_that_computes(engines: tuple[LLM, LLM], n: int) -> None:
    giver, taker = engines
    taker.reset_prefix_cache()
    expected, num_cached = decode(taker, PROMPT, None, n)
    assert num_cached == 0
    taker.reset_prefix_cache()
    params = prefill(giver, PROMPT)
    assert params["remote_num_tokens"] == 96
    moved, num_cached = decode(taker, PROMPT, params, n)
    assert (moved, num_cached) == (expected, 96)
    taker.reset_prefix_cache()
    again, num_cached = decode(taker, PROMPT, params, n)
    assert (again, num_cached) == (expected, 0), "blocks are given once, and computed where they do not come"


def test_a_role_is_kept(engines: tuple[LLM, LLM], llm: LLM) -> None:
    giver, taker = engines
    with pytest.raises(Exception, match="kv_transfer_params: this engine takes blocks and gives none"):
        prefill(taker, PROMPT)
    params = prefill(giver, PROMPT)
    assert decode(giver, PROMPT, params) == decode(giver, PROMPT, None), "it computes them"
    with pytest.raises(Exception, match="start it with --kv-transfer-config"):
        decode(llm, PROMPT, params)


def test_an_engine_that_died_has_nothing_and_nothing_is_lost(engines: tuple[LLM, LLM]) -> None:
    giver, taker = engines
    taker.reset_prefix_cache()
    expected, _ = decode(taker, PROMPT, None)
    taker.reset_prefix_cache()
    params = prefill(giver, PROMPT)
    os.kill(core_pid(giver), signal.SIGKILL)
    assert decode(taker, PROMPT, params) == (expected, 0)
    taker.reset_prefix_cache()
    assert decode(taker, PROMPT, prefill(giver, PROMPT)) == (expected, 96), "it gives again when it is back"


@pytest.mark.parametrize("victim", ["worker", "core"])
def test_a_process_of_the_decode_engine_dies_after_the_blocks_have_come(engines: tuple[LLM, LLM], victim: str) -> None:
    giver, taker = engines
    taker.reset_prefix_cache()
    prompts = [[number, *PROMPT] for number in range(1, 4)]
    long = SamplingParams(max_tokens=380, seed=3, temperature=1.0, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [list(output.outputs[0].token_ids) for output in taker.generate(asked, long, use_tqdm=False)]
    taker.reset_prefix_cache()
    moved = [long.clone(extra_args={"kv_transfer_params": prefill(giver, prompt)}) for prompt in prompts]

    async def ask(client: AsyncClient, prompt: list[int], params: SamplingParams) -> list[int]:
        tokens: list[int] = []
        async for output in client.generate({"prompt_token_ids": prompt}, params):
            is_first = not tokens
            tokens += output.outputs[0].token_ids
            if is_first and prompt is prompts[-1]:
                stats = await client.engine_stats()
                assert stats.kv_transfer_loaded_bytes > before.kv_transfer_loaded_bytes, "blocks have come"
                core = core_pid(taker)
                os.kill(core if victim == "core" else max(descendants(core)), signal.SIGKILL)
        return tokens

    async def ask_all() -> list[list[int]]:
        async with AsyncClient.connect(taker.client.address) as client:
            return await asyncio.gather(*(ask(client, *one) for one in zip(prompts, moved, strict=True)))

    before = taker.stats()
    assert asyncio.run(ask_all()) == expected


def test_a_client_of_both_has_prompts_computed_by_one(engines: tuple[LLM, LLM]) -> None:
    giver, taker = engines
    prompts = [[number, *PROMPT, *PROMPT] for number in range(10, 14)]
    expected = [decode(taker, prompt, None)[0][0][0] for prompt in prompts]
    taker.reset_prefix_cache()

    async def ask(client: AsyncClient, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        params = SamplingParams(max_tokens=16, seed=5, temperature=1.0, ignore_eos=True)
        async for output in client.generate(prompt, params):
            tokens += output.outputs[0].token_ids
        return tokens

    async def ask_all() -> None:
        addresses = ",".join(llm.client.address for llm in engines)
        async with AsyncClient.connect(addresses) as client:
            before = await client.engine_stats()
            assert await ask(client, PROMPT) == (await ask(client, PROMPT)), "too short to be sent elsewhere"
            assert (await client.engine_stats()).kv_transfer_saved_bytes == before.kv_transfer_saved_bytes
            assert await asyncio.gather(*(ask(client, prompt) for prompt in prompts[:3])) == expected[:3]
            after = await client.engine_stats()
            assert after.kv_transfer_loaded_bytes > before.kv_transfer_loaded_bytes
            assert await ask(client, prompts[0]) == expected[0]
            again = await client.engine_stats()
            assert again.kv_transfer_saved_bytes == after.kv_transfer_saved_bytes, "it is cached"
            os.kill(core_pid(giver), signal.SIGKILL)
            assert await ask(client, prompts[3]) == expected[3]

    asyncio.run(ask_all())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_storm(engines: tuple[LLM, LLM], seed: int) -> None:
    rng = random.Random(seed)
    asked = []
    for _ in range(40):
        prompt = [rng.randrange(3) + 1] * rng.randrange(1, 140) + [
            rng.randrange(90) + 1 for _ in range(rng.choice([9, 200]))
        ]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 60), seed=rng.randrange(99), temperature=rng.choice([0.0, 1.0]), logprobs=1
        )
        asked.append((prompt, params))

    async def ask(client: AsyncClient, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
        tokens, logprobs = [], []
        async for output in client.generate(prompt, params):
            (new,) = output.outputs
            tokens += new.token_ids
            logprobs += [
                position[token].logprob for token, position in zip(new.token_ids, new.logprobs or [], strict=True)
            ]
        return tokens, logprobs

    async def disturb(client: AsyncClient) -> None:
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0.05, 0.4))  # any moment will do
            llm = rng.choice(engines)
            victims = [core_pid(llm), *descendants(core_pid(llm))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice([victims[0], max(victims)]), signal.SIGKILL)

    async def run() -> None:
        addresses = ",".join(llm.client.address for llm in engines)
        async with AsyncClient.connect(addresses) as client, AsyncClient.connect(engines[1].client.address) as alone:
            expected = [await ask(alone, *one) for one in asked]
            await client.reset_prefix_cache()
            disturbing = asyncio.create_task(disturb(client))
            assert await asyncio.gather(*(ask(client, *one) for one in asked)) == expected
            await disturbing

    asyncio.run(run())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int8", "tensor_parallel_size": 2}, id="int8, two ranks"),
        pytest.param({"dtype": "bfloat16", "pipeline_parallel_size": 2}, id="two stages", marks=pytest.mark.long),
        pytest.param({"dtype": "float32", "cpu_kernels": "torch"}, id="torch", marks=pytest.mark.long),
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, id="fp8", marks=pytest.mark.long),
        pytest.param({"dtype": "float32", "kv_offloading_size": 0.01}, id="offloading", marks=pytest.mark.long),
        pytest.param(
            {"dtype": "float32", "speculative_config": {"method": "ngram"}}, id="drafts", marks=pytest.mark.long
        ),
    ],
)
def test_blocks_leave_and_come_back_to_any_kind_of_workers(model: Path, settings: dict[str, Any]) -> None:
    with LLM(str(model), **SETTINGS, **settings, **transfer("kv_both")) as llm:
        expected, _ = decode(llm, PROMPT, None)
        params = prefill(llm, PROMPT)
        llm.reset_prefix_cache()
        assert decode(llm, PROMPT, params) == (expected, 96)


@pytest.mark.long
def test_an_engine_that_computes_other_bits_is_refused(model: Path, engines: tuple[LLM, LLM]) -> None:
    giver, _ = engines
    with LLM(str(model), dtype="bfloat16", **SETTINGS, **transfer("kv_both")) as other:
        expected, _ = decode(other, PROMPT, None)
        other.reset_prefix_cache()
        assert decode(other, PROMPT, prefill(giver, PROMPT)) == (expected, 0)


def test_over_http_and_between_machines(model: Path, tmp_path: Path) -> None:
    assert main(["keygen", "group", "--directory", str(tmp_path)]) == 0
    config = transfer("kv_both", kv_ip="127.0.0.1")["kv_transfer_config"]
    flags = ["--kv-transfer-config", json.dumps(config), "--group-secret-key-file", str(tmp_path / "group.key_secret")]
    body = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    with serve(model, "--dtype", "float32", "--max-model-len", "192", "--served-model-name", "m", *flags) as server:
        server.wait_until_ready()
        expected = server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
        asked = {**body, "max_tokens": 1, **REMOTE_DECODE}
        assert server.post("/v1/completions", {**asked, "stream": True}).status_code == 400
        assert server.post("/v1/completions", {**asked, "n": 2}).status_code == 400
        assert server.post("/v1/completions", {**asked, "prompt": [PROMPT, PROMPT]}).status_code == 400
        params = server.post("/v1/completions", asked).json()["kv_transfer_params"]
        assert params["remote_host"] == "127.0.0.1" and params["remote_port"] > 0
        assert server.post("/reset_prefix_cache", {}).status_code == 200
        answer = server.post("/v1/completions", {**body, "kv_transfer_params": params}).json()
        assert answer["choices"][0]["token_ids"] == expected and "kv_transfer_params" not in answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        chat = {"model": "m", "messages": [{"role": "user", "content": "a" * 40}], "max_tokens": 1, **REMOTE_DECODE}
        assert "kv_transfer_params" in server.post("/v1/chat/completions", chat).json()
        assert 'direction="loaded"' in server.get("/metrics").text
