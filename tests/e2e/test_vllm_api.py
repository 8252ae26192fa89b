"""vLLM's classes on one engine of a tiny model."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.compat.vllm import LLM, AsyncLLMEngine, LLMEngine, SamplingParams
from octavo.compat.vllm.config import ProfilerConfig
from octavo.compat.vllm.sampling_params import BeamSearchParams, RequestOutputKind
from octavo.protocol.errors import InvalidRequestError, PromptTooLongError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def vllms(model: Path, traces: Path) -> Iterator[LLM]:
    profiler = ProfilerConfig(profiler="torch", torch_profiler_dir=str(traces))
    settings = {"dtype": "float32", "max_model_len": 64, "tensor_parallel_size": 1, "profiler_config": profiler}
    with LLM(str(model), **settings) as llm:
        yield llm


def test_max_tokens_beyond_the_context_end_with_length(vllms: LLM) -> None:
    (output,) = vllms.generate([1, 2, 3, 4], SamplingParams(max_tokens=1000, min_tokens=100, ignore_eos=True))
    (sequence,) = output.outputs
    assert sequence.finished() and (len(sequence.token_ids), sequence.finish_reason) == (60, "length")
    with pytest.raises(PromptTooLongError):
        vllms.generate([1] * 64, GREEDY)


def test_arguments_that_only_vllm_has(vllms: LLM) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=2, logprobs=2, flat_logprobs=True, extra_args={"unknown": 1})
    plain = SamplingParams(temperature=0.0, max_tokens=2, logprobs=2)
    several = ["hello there", {"prompt": "hello", "multi_modal_data": None}]
    options = {"truncate_prompt_tokens": 3}
    flat = vllms.generate(several, asked, use_tqdm=lambda *_, **__: None, priority=1, tokenization_kwargs=options)
    dicts = vllms.generate(several, plain, use_tqdm=False, tokenization_kwargs=options)
    for one, other in zip(flat, dicts, strict=True):
        assert len(one.prompt_token_ids) <= 3
        assert list(one.outputs[0].logprobs) == other.outputs[0].logprobs
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
        vllms.generate("a", GREEDY, mm_processor_kwargs={"a": 1})


def test_a_tokenizer_of_transformers_renders_what_chat_sends(vllms: LLM) -> None:
    tokenizer = vllms.get_tokenizer()
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    (output,) = vllms.chat(MESSAGES, GREEDY, False)
    assert output.prompt == rendered and tokenizer.decode(output.prompt_token_ids) == rendered
    encoded = tokenizer("hello")
    (plain,) = vllms.generate("hello", GREEDY, use_tqdm=False)
    assert encoded["input_ids"] == plain.prompt_token_ids and set(encoded) == {"input_ids", "attention_mask"}
    assert len(tokenizer) == vllms.llm_engine.model_config.get_vocab_size()
    assert vllms.llm_engine.vllm_config.model_config.hf_config.model_type == "llama"
    (beams,) = vllms.beam_search(["hello"], BeamSearchParams(2, 3))
    assert len(beams.sequences) == 2


def test_an_engine_is_stepped_until_all_requests_have_ended(vllms: LLM) -> None:
    engine = LLMEngine(vllms)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    ids = [engine.add_request(str(index), [index + 1, 2], params, prompt_text=f"p{index}") for index in range(3)]
    with pytest.raises(PromptTooLongError):
        engine.add_request("long", [1] * 64, params)
    final, lengths = {}, {request_id: [] for request_id in ids}
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths[output.request_id].append(len(output.outputs[0].token_ids))
            if output.finished:
                final[output.request_id] = output
    assert all(counts == sorted(counts) and counts[-1] == 8 for counts in lengths.values())
    expected = vllms.generate([[index + 1, 2] for index in range(3)], params, use_tqdm=False)
    assert [final[one].outputs[0].token_ids for one in ids] == [one.outputs[0].token_ids for one in expected]
    assert final["2"].prompt == "p2" and final["2"].metrics.num_generation_tokens == 8
    assert engine.step() == [] and engine.get_num_unfinished_requests() == 0


def test_a_stepped_engine_raises_what_ends_a_request(vllms: LLM) -> None:
    engine = LLMEngine(vllms)
    engine.add_request("bad", [1], SamplingParams(allowed_token_ids=[10**6]))
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        engine.step()
    engine.add_request("gone", [1], SamplingParams(max_tokens=60, ignore_eos=True))
    with pytest.raises(InvalidRequestError, match="'gone' is running"):
        engine.add_request("gone", [2], SamplingParams())
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request(["gone"])
    assert not [output for output in engine.step() if output.request_id == "gone"]
    assert not engine.has_unfinished_requests()


def test_requests_wait_in_a_queue(vllms: LLM) -> None:
    ids = vllms.enqueue([[1, 2], [3, 4]], [GREEDY, SamplingParams(max_tokens=2, ignore_eos=True)])
    outputs = vllms.wait_for_completion()
    assert [output.request_id for output in outputs] == ids
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 2]


def test_asynchronous_outputs_are_cumulative_in_any_event_loop(vllms: LLM) -> None:
    engine = AsyncLLMEngine(vllms)

    async def collect(params: SamplingParams) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) async for output in engine.generate([5, 6], params, "id")]

    whole = asyncio.run(collect(GREEDY))
    deltas = asyncio.run(
        collect(SamplingParams(1, temperature=0.0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA))
    )
    assert len(whole) > 1 and all(later[: len(one)] == one for one, later in pairwise(whole))
    assert whole[-1] == [token for delta in deltas for token in delta] and len(whole[-1]) == 6


def test_an_asynchronous_request_ends_with_its_reader(vllms: LLM) -> None:
    engine = AsyncLLMEngine(vllms)

    async def scenario() -> None:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        await engine.resume_generation()
        outputs = engine.generate([1], params, "left")
        await anext(outputs)
        await outputs.aclose()
        final = None
        async for output in engine.generate([1], params, request_id="ended"):
            final = output
            await engine.abort("ended")
        assert final is not None and final.outputs[0].finish_reason == "abort"
        with pytest.raises(InvalidRequestError):
            await anext(engine.generate([1], SamplingParams(allowed_token_ids=[10**6]), "bad"))
        await engine.check_health()
        assert engine.is_running and not engine.errored

    asyncio.run(scenario())
    while vllms.client.num_live_requests:
        vllms.stats()


def test_metrics_weights_and_traces(vllms: LLM, traces: Path) -> None:
    before = vllms.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    metrics = {metric.name: metric for metric in vllms.get_metrics()}
    assert metrics["vllm:generation_tokens"].value > 0
    assert metrics["vllm:e2e_request_latency_seconds"].count > 0
    assert vllms.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},)) == [None]
    assert vllms.collective_rpc("reload_weights") == [None]
    vllms.sleep(1)
    assert vllms.wake_up() is True
    assert vllms.reset_prefix_cache(reset_running_requests=True) is True
    vllms.start_profile("first")
    after = vllms.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    vllms.stop_profile()
    assert after == before and list((traces / "first").iterdir())
    with pytest.raises(NotImplementedError, match=r"no method my_method.*update_weights"):
        vllms.collective_rpc("my_method")
    with pytest.raises(NotImplementedError, match="update_weights"):
        vllms.apply_model(len)
