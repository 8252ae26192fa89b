"""Weights change, processes die and engines sleep while requests run: each token is that of the weights it names."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from servers import descendants, serve
from waiting import until

from octavo import LLM, AsyncClient, SamplingParams
from octavo.frontend.outputs import CompletionOutput
from octavo.protocol.errors import ConflictError, InvalidRequestError, OverloadedError
from octavo.protocol.params import OutputKind

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 6, "block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CHECK", "1")


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    save_file({name: (tensor * 1.5).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def engines(model: Path, other: Path):
    """Return engines that were started with the weights of even versions, and of odd ones."""
    with LLM(str(model), **SETTINGS) as even, LLM(str(other), **SETTINGS) as odd:
        yield even, odd


def prompts(count: int) -> list[list[int]]:
    return [[(7 * index + 3 * place) % 250 + 1 for place in range(5 + 11 * index)] for index in range(count)]


async def last(client: AsyncClient, prompt: list[int], params: SamplingParams = GREEDY) -> CompletionOutput:
    final = params.clone(output_kind=OutputKind.FINAL_ONLY)
    async for output in client.generate({"prompt_token_ids": prompt}, final):
        return output.outputs[0]
    raise AssertionError("no output")


def require_tokens_of_versions(engines: tuple[LLM, LLM], prompt: list[int], output: CompletionOutput) -> None:
    """Each range has the tokens and logprobs of a fresh engine that continues what comes before."""
    end = 0
    for start, stop, version in output.weight_versions:
        assert start == end
        end = stop
        asked = {"prompt_token_ids": [*prompt, *output.token_ids[:start]]}
        params = GREEDY.clone(max_tokens=stop - start)
        (fresh,) = engines[version % 2].generate(asked, params, use_tqdm=False)
        assert fresh.outputs[0].token_ids == output.token_ids[start:stop], (start, version)
        assert fresh.outputs[0].logprobs == output.logprobs[start:stop]
    assert end == len(output.token_ids)


def test_a_storm_of_updates(model, other, engines):
    asked = prompts(10)

    async def main() -> list[CompletionOutput]:
        async with AsyncClient.launch(str(model), **SETTINGS) as client:
            running = [asyncio.create_task(last(client, prompt)) for prompt in asked]
            for version in range(1, 6):
                stats = await client.engine_stats()
                goal = stats.generation_tokens + 150
                await until(lambda goal=goal: enough(client, goal), lambda: "tokens")
                source = [str(model), load_file(other / "model.safetensors")][version % 2]
                assert await client.update_weights(source) == version
            return await asyncio.gather(*running)

    outputs = asyncio.run(main())
    assert max(len(output.weight_versions) for output in outputs) > 2
    for prompt, output in zip(asked, outputs, strict=True):
        require_tokens_of_versions(engines, prompt, output)


async def enough(client: AsyncClient, goal: int) -> bool:
    return (await client.engine_stats()).generation_tokens >= goal


@pytest.mark.long
def test_requests_that_continue_keep_their_keys_and_are_marked(model, other):
    async def main() -> CompletionOutput:
        async with AsyncClient.launch(str(model), **SETTINGS) as client:
            running = asyncio.create_task(last(client, prompts(1)[0]))
            await until(lambda: enough(client, 20), lambda: "tokens")
            await client.update_weights(str(other), in_flight="continue")
            before = await client.engine_stats()
            output = await running
            after = await client.engine_stats()
            assert after.num_recomputed_tokens == before.num_recomputed_tokens == 0
            # Blocks of both versions are shared with nobody.
            (again, fresh) = await asyncio.gather(last(client, prompts(1)[0]), last(client, prompts(1)[0]))
            assert again.token_ids == fresh.token_ids and again.weight_versions == [(0, 160, 1)]
            return output

    output = asyncio.run(main())
    assert [version for _, _, version in output.weight_versions] == [0, 1]


@pytest.mark.parametrize("victim", [pytest.param("worker", marks=pytest.mark.long), "core"])
def test_updated_weights_survive_a_death(model, other, engines, victim):
    tensors = load_file(other / "model.safetensors")
    halves = dict(list(tensors.items())[:2]), tensors

    async def main() -> None:
        async with AsyncClient.launch(str(model), **SETTINGS) as client:
            await client.update_weights(halves[1], label="all")
            await client.update_weights({"model.norm.weight": tensors["model.norm.weight"]}, is_partial=True)
            running = asyncio.create_task(last(client, prompts(1)[0]))
            await until(lambda: enough(client, 10), lambda: "tokens")
            assert client.engine is not None
            core = client.engine.core_pid
            os.kill(core if victim == "core" else descendants(core)[0], signal.SIGKILL)
            output = await running
            (status,) = (await client.weights_status()).values()
            assert status.version == 2 and not status.fault
            assert client.facts.weight_version == 2
            fresh = engines[1].generate({"prompt_token_ids": prompts(1)[0]}, GREEDY, use_tqdm=False)[0].outputs[0]
            assert output.token_ids == fresh.token_ids and output.logprobs == fresh.logprobs
            assert output.weight_versions == [(0, 160, 2)]

    asyncio.run(main())


@pytest.mark.long
def test_weights_that_were_not_kept_are_lost_with_the_worker(model, other):
    tensors = load_file(other / "model.safetensors")

    async def main() -> None:
        async with AsyncClient.launch(str(model), **SETTINGS) as client:
            await client.update_weights(tensors, is_kept=False)
            assert "model" not in str([names for *_, names in os.walk(client.facts.weights_dir)])
            assert client.engine is not None
            os.kill(descendants(client.engine.core_pid)[0], signal.SIGKILL)

            async def is_refused() -> bool:
                return bool(next(iter((await client.weights_status()).values())).fault)

            await until(is_refused, lambda: "the loss")
            with pytest.raises(OverloadedError, match="update all weights"):
                await last(client, prompts(1)[0])
            with pytest.raises(ConflictError, match="a partial update needs all other weights"):
                await client.update_weights({"model.norm.weight": tensors["model.norm.weight"]}, is_partial=True)
            assert await client.update_weights(tensors) == 2
            assert (await last(client, prompts(1)[0])).weight_versions == [(0, 160, 2)]

    asyncio.run(main())


@pytest.mark.long
def test_pauses(model, engines):
    async def main() -> list[CompletionOutput]:
        outputs = []
        async with AsyncClient.launch(str(model), **SETTINGS) as client:
            for mode in ("keep", "wait", "abort"):
                running = asyncio.create_task(last(client, prompts(2)[1]))
                goal = (await client.engine_stats()).generation_tokens + 10
                await until(lambda goal=goal: enough(client, goal), lambda: "tokens")
                await client.pause_generation(mode=mode)
                assert await client.is_paused()
                assert running.done() == (mode == "wait") or mode == "abort"
                late = asyncio.create_task(last(client, prompts(1)[0]))
                before = (await client.engine_stats()).generation_tokens
                await asyncio.sleep(0)
                assert (await client.engine_stats()).generation_tokens == before and not late.done()
                await client.resume_generation()
                outputs += [await running, await late]
        return outputs

    kept, late, waited, later, aborted, latest = asyncio.run(main())
    assert aborted.finish_reason == "abort"
    for prompt, output in ((1, kept), (0, late), (1, waited), (0, later), (0, latest)):
        require_tokens_of_versions(engines, prompts(2)[prompt], output)


def mapped_bytes(pid: int) -> int:
    found = re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.long
def test_sleep_gives_memory_back_and_kept_requests_continue(model, engines):
    async def main() -> CompletionOutput:
        settings = {**SETTINGS, "kv_cache_memory_bytes": 512 << 20, "max_num_seqs": 4}
        async with AsyncClient.launch(str(model), **settings) as client:
            assert client.engine is not None
            (worker,) = descendants(client.engine.core_pid)
            running = asyncio.create_task(last(client, prompts(1)[0]))
            await until(lambda: enough(client, 10), lambda: "tokens")
            before = mapped_bytes(worker)
            await client.sleep(1, mode="keep")
            assert before - mapped_bytes(worker) > 500 << 20, "the cache is not even mapped any more"
            with pytest.raises(ConflictError, match="asleep"):
                await client.sleep(2)
            with pytest.raises(ConflictError, match="asleep"):
                await client.resume_generation()
            await client.wake_up(["weights"])
            assert await client.is_sleeping() and not running.done()
            await client.wake_up(["kv_cache"])
            return await running

    require_tokens_of_versions(engines, prompts(1)[0], asyncio.run(main()))


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}], ids=str
)
def test_all_ranks_and_engines_change_together(model, other, engines, settings):
    with LLM(str(model), **SETTINGS, **settings) as llm:
        identity = llm.client.facts.identity
        assert llm.update_weights(load_file(other / "model.safetensors")) == 1
        assert llm.client.facts.identity != identity
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts(6)], GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts(6), outputs, strict=True):
            assert output.outputs[0].weight_versions == [(0, 160, 1)]
            require_tokens_of_versions(engines, prompt, output.outputs[0])
        with pytest.raises(
            InvalidRequestError, match="engine 1: .*lacks" if "data_parallel_size" in settings else "lacks"
        ):
            llm.update_weights({"lm_head.weight": load_file(model / "model.safetensors")["lm_head.weight"]})
        assert not llm.is_paused()


def test_routes(model, other):
    flags = ("--dtype", "float32", "--max-model-len", "256")
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    with serve(model, *flags, "--enable-dev-routes") as server:
        server.wait_until_ready()
        before = server.post("/v1/completions", body).json()
        answer = server.post("/update_weights", {"path": str(other), "label": "two"})
        assert answer.json() == {"success": True, "weight_version": 1}
        after = server.post("/v1/completions", body).json()
        assert before["system_fingerprint"] != after["system_fingerprint"]
        assert "weight_versions" not in after["choices"][0]
        asked = server.post("/v1/completions", {**body, "return_weight_versions": True}).json()
        assert asked["choices"][0]["weight_versions"] == [[0, 8, 1]]
        messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "return_weight_versions": True}
        assert server.post("/v1/chat/completions", messages).json()["choices"][0]["weight_versions"][-1][2] == 1
        streamed = server.post("/v1/completions", {**body, "stream": True, "return_weight_versions": True}).text
        assert streamed.count('"weight_versions":[[') > 1
        beams = {**body, "n": 2, "use_beam_search": True, "return_weight_versions": True}
        found = server.post("/v1/completions", beams).json()["choices"]
        assert [one["weight_versions"] for one in found] == [[[0, len(one["token_ids"]), 1]] for one in found]
        given = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}, "return_weight_versions": True}
        assert server.post("/inference/v1/generate", given).json()["choices"][0]["weight_versions"][-1][2] == 1
        assert server.post("/pause?mode=keep", {}).json()["status"] == "paused"
        assert server.get("/is_paused").json() == {"is_paused": True}
        assert server.post("/resume", {}).json()["success"]
        assert server.post("/sleep?level=0&mode=keep", {}).json() == {"status": "sleeping", "level": 0, "success": True}
        assert server.get("/is_paused").json() == {"is_paused": True}
        assert server.post("/wake_up?tags=scheduling", {}).json()["tags"] == ["scheduling"]
        assert server.get("/is_paused").json() == {"is_paused": False}
        assert server.post("/sleep?level=2", {}).json()["success"]
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}
        for path in ("/sleep?level=1", "/wake_up?tags=scheduling", "/resume"):
            assert server.post(path, {}).status_code == 409
        assert server.post("/update_weights", {"path": str(model)}).status_code == 409
        assert server.post("/wake_up?tags=weights", {}).json()["status"] == "sleeping"
        assert server.post("/update_weights", {"path": str(model)}).json()["weight_version"] == 2
        assert server.post("/wake_up", {}).json()["status"] == "awake"
        again = server.post("/v1/completions", body).json()
        assert again["choices"] == before["choices"] and again["system_fingerprint"] == before["system_fingerprint"]
        (status,) = server.get("/weights").json()["data"]
        assert status["weight_version"] == 2 and not status["asleep"]
        assert server.post("/sleep?level=3", {}).status_code == 400
        assert server.post("/pause?mode=soon", {}).status_code == 400
        refused = server.post("/update_weights", {"path": "/nowhere"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "path"
        assert "no checkpoint in /nowhere" in refused.text
    with serve(model, *flags) as server:
        server.wait_until_ready()
        assert {server.post(path, {}).status_code for path in ("/sleep", "/pause", "/update_weights")} == {404}
