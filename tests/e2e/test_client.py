"""`AsyncClient` on a real engine: generation, aborts, several applications, lost applications."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from otlp_collector import Collector, attributes
from tiny_models import make_tiny
from waiting import TIMEOUT_S, until

from octavo.frontend.client import AsyncClient
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import EngineDeadError, InvalidRequestError, PromptTooLongError, StartupError
from octavo.protocol.params import OutputKind, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]


class Engine:
    """An engine and an event loop that outlive one test."""

    def __init__(self, model: Path) -> None:
        self.runner = asyncio.Runner()
        self.client: AsyncClient = self.runner.run(self._launch(model))

    async def _launch(self, model: Path) -> AsyncClient:
        return await AsyncClient.launch(str(model), dtype="float32", max_model_len=256, max_num_seqs=4)

    def run(self, scenario: Callable[[AsyncClient], Awaitable[None]]) -> None:
        self.runner.run(asyncio.wait_for(scenario(self.client), 60))

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model")))
    yield engine
    engine.close()


async def until_idle(client: AsyncClient) -> None:
    """Wait until the engine has nothing to do, and check that it gave everything back."""

    async def idle_stats() -> Any:
        stats = await client.engine_stats()
        return None if stats.num_running or stats.num_waiting else stats

    stats = await until(idle_stats)
    assert stats.num_free_blocks == stats.num_blocks


def test_deltas_add_up_to_the_whole(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=1)
        deltas = [output async for output in client.generate(PROMPT, params)]
        whole = [o async for o in client.generate(PROMPT, params.clone(output_kind=OutputKind.FINAL_ONLY))]
        grown = [o async for o in client.generate(PROMPT, params.clone(output_kind=OutputKind.CUMULATIVE))]
        (final,) = whole[0].outputs
        assert len(deltas) > 1
        assert len(whole) == 1
        assert "".join(delta.outputs[0].text for delta in deltas) == final.text == grown[-1].outputs[0].text
        assert [t for delta in deltas for t in delta.outputs[0].token_ids] == final.token_ids
        assert [p for delta in deltas for p in delta.outputs[0].logprobs or []] == final.logprobs
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert final.finish_reason == "length"
        assert len(final.token_ids) == 30

    engine.run(scenario)


def test_leaving_the_loop_early_aborts_the_request(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        outputs = client.generate(PROMPT, LONG)
        async for _ in outputs:
            break
        await outputs.aclose()
        await until_idle(client)
        assert client.num_live_requests == 0

    engine.run(scenario)


def test_cancelling_the_task_aborts_the_request(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in client.generate(PROMPT, LONG):
                started.set()

        task = asyncio.create_task(consume())
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(client)

    engine.run(scenario)


def test_abort_by_id_ends_with_reason_abort(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        reasons = []
        async for output in client.generate(PROMPT, LONG, request_id="mine"):
            reasons.append(output.outputs[0].finish_reason)
            await client.abort("mine")
        assert reasons[-1] == "abort"
        assert not await client.abort("mine")
        await until_idle(client)

    engine.run(scenario)


def test_several_sequences_differ_and_the_first_is_the_single_one(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=12, output_kind=OutputKind.FINAL_ONLY)
        (three,) = [output async for output in client.generate(PROMPT, params)]
        (one,) = [output async for output in client.generate(PROMPT, params.clone(n=1))]
        assert [sequence.index for sequence in three.outputs] == [0, 1, 2]
        assert three.outputs[0].token_ids == one.outputs[0].token_ids
        assert len({tuple(sequence.token_ids) for sequence in three.outputs}) == 3

    engine.run(scenario)


def test_text_and_token_prompts_are_the_same(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        text = "hello world"
        tokens = await client.tokenize(text)
        params = SamplingParams(temperature=0.0, output_kind=OutputKind.FINAL_ONLY)
        results = []
        for prompt in (text, tokens, {"prompt": text}, {"prompt_token_ids": tokens}):
            (output,) = [output async for output in client.generate(prompt, params)]
            assert output.prompt_token_ids == tokens
            results.append(output.outputs[0].token_ids)
        assert all(result == results[0] for result in results)

    engine.run(scenario)


def test_a_conversation_is_its_rendered_prompt(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        messages = [{"role": "user", "content": "hello"}]
        text = client.chat_template().render(messages)
        token_ids = client.tokenizer.encode(text, add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_tokens=8, output_kind=OutputKind.FINAL_ONLY)
        (answer,) = [output async for output in client.chat(messages, params, request_id="talk")]
        (expected,) = [output async for output in client.generate(token_ids, params)]
        assert (answer.prompt, answer.prompt_token_ids, answer.request_id) == (text, token_ids, "talk")
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        async for _ in client.chat(messages, LONG):
            break
        await until_idle(client)

    engine.run(scenario)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ([], SamplingParams(), InvalidRequestError, "prompt"),
        ([10**6], SamplingParams(), InvalidRequestError, "prompt"),
        ([-1], SamplingParams(), InvalidRequestError, "prompt"),
        ([1.5], SamplingParams(), InvalidRequestError, "prompt"),
        ({}, SamplingParams(), InvalidRequestError, "prompt"),
        ([1] * 256, SamplingParams(max_tokens=1), PromptTooLongError, "prompt"),
        ([1] * 200, SamplingParams(max_tokens=57), PromptTooLongError, "max_tokens"),
        ([1], SamplingParams(logit_bias={10**6: 1.0}), InvalidRequestError, "logit_bias"),
        ([1], SamplingParams(stop_token_ids=[10**6]), InvalidRequestError, "stop_token_ids"),
        ([1], SamplingParams(logprobs=1000), InvalidRequestError, "logprobs"),
    ],
)
def test_bad_input_names_its_field_and_harms_nobody(
    engine: Engine, prompt: object, params: SamplingParams, error: type[InvalidRequestError], param: str
) -> None:
    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(error) as caught:
            async for _ in client.generate(prompt, params):
                pass
        assert caught.value.param == param
        assert client.health().ok

    engine.run(scenario)


def test_a_priority_without_effect_is_rejected(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(InvalidRequestError, match="--scheduling-policy priority") as caught:
            async for _ in client.generate(PROMPT, priority=-1):
                pass
        assert caught.value.param == "priority"

    engine.run(scenario)


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 1.0, True])
def test_a_priority_that_is_no_integer_of_64_bits_is_rejected(engine: Engine, priority: object) -> None:
    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(InvalidRequestError, match="64 bits") as caught:
            async for _ in client.generate(PROMPT, priority=priority):
                pass
        assert caught.value.param == "priority"

    engine.run(scenario)


def test_the_whole_context_can_be_used(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
        (output,) = [output async for output in client.generate([3] * 250, params)]
        assert len(output.outputs[0].token_ids) == 6
        assert output.outputs[0].finish_reason == "length"

    engine.run(scenario)


def test_a_second_application_joins_and_leaves(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with AsyncClient.connect(client.address) as second:
            assert second.facts == client.facts
            params = SamplingParams(temperature=0.9, seed=1, max_tokens=20, output_kind=OutputKind.FINAL_ONLY)
            (theirs,) = [output async for output in second.generate(PROMPT, params, request_id="same id")]
            (ours,) = [output async for output in client.generate(PROMPT, params, request_id="same id")]
            assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids
        assert client.health().ok

    engine.run(scenario)


def test_requests_of_an_application_are_traced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    collector = Collector()
    parent = trace.NonRecordingSpan(trace.SpanContext(7, 9, is_remote=False, trace_flags=trace.TraceFlags(1)))

    async def scenario(client: AsyncClient) -> None:
        async with AsyncClient.connect(client.address, otlp_traces_endpoint=collector.url) as second:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            with trace.use_span(parent):
                async for _ in second.generate(PROMPT, params, request_id="mine"):
                    pass

    try:
        engine.run(scenario)
        spans = {span.name: span for span in collector.spans}
        assert set(spans) == {"llm_request", "queue", "prefill", "decode", "detokenize"}, "closing sends them"
        root = spans["llm_request"]
        assert int.from_bytes(root.trace_id) == 7 and int.from_bytes(root.parent_span_id) == 9
        found = attributes(root)
        assert found["gen_ai.request.id"] == "mine" and found["gen_ai.usage.completion_tokens"] == 3
        assert found["gen_ai.response.model"] == engine.client.config.served_model_names[0]
    finally:
        collector.close()


def test_a_killed_application_leaves_nothing_behind(engine: Engine) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from octavo import AsyncClient, SamplingParams
        async def main():
            async with AsyncClient.connect(sys.argv[1]) as client:
                params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
                async def one():
                    async for _ in client.generate([1, 2, 3], params):
                        print("token", flush=True)
                await asyncio.gather(*(one() for _ in range(8)))
        asyncio.run(main())
    """)

    async def scenario(client: AsyncClient) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", program, client.address, stdout=subprocess.PIPE, env=dict(os.environ)
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S) == b"token\n"
        process.kill()
        await process.wait()
        # The pipe's transport is closed by the wait above only once its end of file was read.
        await process.stdout.read()
        await asyncio.wait_for(until_idle(client), TIMEOUT_S)
        assert client.health().ok

    engine.run(scenario)


def test_connecting_to_an_address_without_an_engine_fails(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(StartupError, match="no engine answers"):
            await AsyncClient.connect(f"ipc://{tmp_path}/nothing", connect_timeout_s=0.3)

    asyncio.run(main())


def test_closing_ends_what_runs_and_may_happen_twice(engine: Engine) -> None:
    async def scenario(client: AsyncClient) -> None:
        second = await AsyncClient.connect(client.address)
        started = asyncio.Event()

        async def one() -> None:
            async for _ in second.generate(PROMPT, LONG):
                started.set()

        # Ten times as many as run at once, so that most of them are not done, however slow this process is.
        running = [asyncio.create_task(one()) for _ in range(40)]
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        await asyncio.gather(second.close(), second.close())
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert {type(end) for end in ends} <= {EngineDeadError, type(None)}
        assert "closed" in str(ends[-1])
        await until_idle(client)

    engine.run(scenario)


def test_a_request_that_is_sent_twice_is_served_twice(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)

    async def one(client: AsyncClient) -> RequestOutput:
        (output,) = [output async for output in client.generate(PROMPT, params, request_id="x")]
        return output

    async def scenario(client: AsyncClient) -> None:
        first, second = await asyncio.gather(one(client), one(client))
        assert first.outputs[0].token_ids == second.outputs[0].token_ids, "the seed follows from the id"
        running = [asyncio.create_task(one(client)) for _ in range(2)]
        await until(lambda: client.num_live_requests >= 2, interval_s=0)
        assert await client.abort("x")
        assert [(await task).outputs[0].finish_reason for task in running] == ["abort", "abort"]
        await until_idle(client)

    engine.run(scenario)


def test_a_stop_that_is_cancelled_leaves_no_core(tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")

    async def main() -> None:
        client = await AsyncClient.launch(str(model), dtype="float32", max_model_len=256)
        assert client.engine is not None
        core_pid = client.engine.core_pid
        os.kill(core_pid, signal.SIGSTOP)  # it will not answer a polite request
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.engine.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(core_pid, 0)
        await client.close()

    asyncio.run(main())


def test_a_dead_engine_is_reported_to_every_request(tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")

    async def main() -> None:
        async with AsyncClient.launch(str(model), dtype="float32", max_model_len=256, restart_core=False) as client:

            async def one() -> None:
                async for _ in client.generate(PROMPT, LONG):
                    started.set()

            started = asyncio.Event()
            tasks = [asyncio.create_task(one()) for _ in range(5)]
            await asyncio.wait_for(started.wait(), TIMEOUT_S)
            assert client.engine is not None
            os.kill(client.engine.core_pid, 9)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineDeadError)
                assert "core" in str(result)
            assert not client.health().ok
            with pytest.raises(EngineDeadError):
                await one()

    asyncio.run(main())


def test_the_socket_of_a_given_address_goes_with_the_engine(tmp_path: Path) -> None:
    """Found by `octavo bench chaos`: zmq removes only sockets that it has named itself."""

    async def main() -> None:
        model = make_tiny("LlamaForCausalLM", tmp_path / "model")
        async with AsyncClient.launch(str(model), address=f"ipc://{tmp_path}/engine", max_model_len=64):
            assert (tmp_path / "engine").is_socket()
        assert not (tmp_path / "engine").exists()

    asyncio.run(main())
