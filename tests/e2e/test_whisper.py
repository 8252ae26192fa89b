"""Whisper through whole engines: against `transformers`, in storms, and through deaths of processes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_kills import assert_deaths_change_nothing
from hung_steps import PLUGIN
from tiny_whisper import RATE, make_whisper, wav, waveform

from octavo import LLM, AsyncClient, SamplingParams
from octavo.frontend.audio.prompts import AudioPrompts, AudioWindow, DecodedAudio
from octavo.frontend.media.parts import MediaSource
from octavo.frontend.model_files.facts import read_model_facts
from octavo.frontend.outputs import RequestOutput
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.native import NativeProduct
from octavo.kernels.native.library import load
from octavo.protocol import restarts
from octavo.protocol.alignment import AlignmentSpec
from octavo.protocol.config import resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError, InvalidRequestError
from octavo.worker_proc.weights.load import load_model

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "limit_mm_per_prompt": {"audio": 1, "image": 0},  # as scripts for vLLM have it
    "encoder_cache_tokens": 160,  # three items of 50 rows: fewer than requests run
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=50, ignore_eos=True, logprobs=1)
START = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), **SETTINGS) as llm:
        yield llm


def prompt(seed: int, text: str = START, seconds: float = 0.8) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"audio": (waveform(seed, seconds), RATE)}}


def result(output: RequestOutput) -> object:
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs]


def run(llm: LLM, *prompts: Any, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.generate(list(prompts), params, use_tqdm=False)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_tokens_and_logprobs_equal_transformers(llm: LLM, path: Path, kernels: str) -> None:
    if kernels == "native":
        compare(llm, path)
        return
    with LLM(str(path), **SETTINGS, cpu_kernels="torch") as through_torch:
        compare(through_torch, path)
        prompts = [prompt(seed) for seed in range(5)]
        alone = [result(run(through_torch, one)[0]) for one in prompts]
        assert list(map(result, run(through_torch, *prompts))) == alone


def compare(llm: LLM, path: Path) -> None:
    """Compare tokens and logprobs of a model with those that `transformers` gives."""
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    prompts = [prompt(1), prompt(2, seconds=1.0), prompt(3, "<|startofprev|>some words before" + START, 0.1)]
    for one, output in zip(prompts, run(llm, *prompts), strict=True):
        samples, rate = one["multi_modal_data"]["audio"]
        features = extractor(samples, sampling_rate=rate, return_tensors="pt").input_features
        token_ids, tokens = output.prompt_token_ids or [], output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(input_features=features, decoder_input_ids=torch.tensor([[*token_ids, *tokens]])).logits[0]
        assert logits[len(token_ids) - 1 : -1].argmax(dim=-1).tolist() == tokens
        logprobs = logits.log_softmax(dim=-1)[len(token_ids) - 1 : -1]
        for row, token, reported in zip(logprobs, tokens, output.outputs[0].logprobs or [], strict=True):
            assert abs(float(row[token]) - reported[token].logprob) < 1e-4


def test_a_request_in_a_storm_has_the_bits_that_it_has_alone(llm: LLM, path: Path) -> None:
    """The same and other clips behind equal tokens, more clips than the encoder cache has room for, preemptions."""
    texts = [START, "<|startofprev|>words " + START, "<|startoftranscript|><|de|><|translate|>"]
    prompts = [prompt(seed % 5, texts[seed % 3]) for seed in range(18)]
    modes = [None, "timestamps", "text"]
    params = [
        SAMPLED.clone(seed=seed, max_tokens=40 + seed % 7, speech_rules=modes[seed // 2 % 3]) for seed in range(18)
    ]
    alone = [result(run(llm, one, params=own)[0]) for one, own in zip(prompts, params, strict=True)]
    assert len({str(one) for one in alone}) == 18
    assert list(map(result, llm.generate(prompts, params, use_tqdm=False))) == alone
    with LLM(str(path), **SETTINGS, num_gpu_blocks_override=6, enable_prefix_caching=False) as small:
        assert list(map(result, small.generate(prompts, params, use_tqdm=False))) == alone
        assert small.stats().num_preemptions > 0
    ngrams = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(
        str(path), **SETTINGS, num_gpu_blocks_override=6, speculative_config=ngrams, kv_offloading_size=0.01
    ) as tiers:
        for _ in range(2):  # the second time with blocks from host memory
            assert list(map(result, tiers.generate(prompts, params, use_tqdm=False))) == alone


def test_blocks_of_a_transcript_move_to_another_engine_that_has_its_sound(llm: LLM, path: Path) -> None:
    text = "<|startofprev|>some words before and more " + START
    connector = {"kv_connector": "OctavoConnector"}
    heard, other = prompt(1, text), prompt(2, text)
    first = GREEDY.clone(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    with (
        LLM(str(path), **SETTINGS, kv_transfer_config={**connector, "kv_role": "kv_producer"}) as giver,
        LLM(str(path), **SETTINGS, kv_transfer_config={**connector, "kv_role": "kv_consumer"}) as taker,
    ):
        for asked, num_cached in ((heard, 16), (other, 0)):
            (output,) = run(giver, heard, params=first)
            given = GREEDY.clone(extra_args={"kv_transfer_params": output.kv_transfer_params})
            (moved,) = run(taker, asked, params=given)
            assert (result(moved), moved.num_cached_tokens) == (result(run(llm, asked)[0]), num_cached)


def test_w8a8_quantizes_the_encoder_too(path: Path) -> None:
    settings = {**SETTINGS, "dtype": "bfloat16", "quantization": "w8a8"}
    user_config = engine_config({"model": str(path), **settings})
    config = resolve(user_config, read_model_facts(user_config.model, Env.read()), device="cpu", num_cores=1)
    tower = load_model(config, lambda fraction: None, library=load()).towers["audio"]
    assert {kind_of(weight.packed) for weight in tower.parameters.linears} == {"u8_channel"}
    with LLM(str(path), **settings) as llm:
        prompts = [prompt(seed) for seed in range(3)]
        assert [result(run(llm, one)[0]) for one in prompts] == list(map(result, run(llm, *prompts)))


def kind_of(packed: PackedLinear) -> str:
    assert isinstance(packed.product, NativeProduct)
    return packed.product.packed.kind


def test_speech_rules_hold(llm: LLM, path: Path) -> None:
    """Random weights draw everything; with the rules there are pairs of timestamps that never decrease."""
    ids = transformers.GenerationConfig.from_pretrained(path)
    first = ids.no_timestamps_token_id + 1
    start = START.removesuffix("<|notimestamps|>")
    sampled = [SAMPLED.clone(seed=seed, speech_rules="timestamps") for seed in range(6)]
    outputs = llm.generate([prompt(1, start)] * 6, sampled, use_tqdm=False)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        times = [token for token in tokens if token >= first]
        assert first <= tokens[0] <= first + ids.max_initial_timestamp_index and len(times) > 1
        assert times == sorted(times) and not {*ids.suppress_tokens, first - 1} & set(tokens)
    for changes, param in (
        ({"speech_rules": "words"}, "speech_rules"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            run(llm, prompt(1), params=SAMPLED.clone(**{"speech_rules": "text", **changes}))
        assert caught.value.param == param


def test_clips_that_cannot_be_used(llm: LLM) -> None:
    audio = [
        (b"no audio", "not audio"),
        (wav(waveform(1))[:40], "audio"),
        (wav(np.zeros(0, dtype=np.float32)), "no samples"),
        ((waveform(1, 2.0), RATE), "longer than the 1 seconds"),
        ((np.array([np.nan], dtype=np.float32), RATE), "not finite"),
        ((waveform(1), 0), "sampling rate"),
        ((waveform(1), 16000.5), "sampling rate"),
        ("text", "str"),
    ]
    for value, message in audio:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            run(llm, {"prompt": START, "multi_modal_data": {"audio": value}})
        assert caught.value.param == "multi_modal_data['audio'][0]"
    with pytest.raises(InvalidRequestError, match="audio"):
        run(llm, START)
    assert run(llm, prompt(1)), "the engine goes on"


def test_a_file_and_its_samples_are_the_same_sound(llm: LLM) -> None:
    samples = np.round(waveform(6) * 32767).astype(np.float32) / 32768
    given = [(samples, RATE), wav(samples * 32768 / 32767)]
    first, second = (run(llm, {"prompt": START, "multi_modal_data": {"audio": one}})[0] for one in given)
    assert result(first) == result(second)


async def windows_of(llm: LLM, value: Any) -> DecodedAudio:
    async def encode(*_: Any, **__: Any) -> list[int]:
        return []

    prompts = AudioPrompts(llm.client.config, encode)
    try:
        return await prompts.read(MediaSource("audio", value, "audio"))
    finally:
        await prompts.close()


def features_of(window: AudioWindow) -> Any:
    tensor = window.item.tensors["input_features"]
    return np.frombuffer(tensor.data.data, np.float32).reshape(tensor.shape)


def test_a_long_sound_is_cut_where_it_is_quiet(llm: LLM) -> None:
    samples = waveform(3, 2.6)
    for quiet_s in (0.93, 1.9):  # windows end after at most 1 s, and are cut in their last tenth
        samples[int(quiet_s * RATE) : int((quiet_s + 0.1) * RATE)] = 0.0
    result = asyncio.run(windows_of(llm, (samples, RATE)))
    assert result.duration_s == pytest.approx(2.6)
    ends = [one.start_s + one.duration_s for one in result.windows]
    assert [one.start_s for one in result.windows] == pytest.approx([0.0, *ends[:-1]])
    assert 0.93 <= ends[0] <= 1.0 and 1.87 <= ends[1] <= 2.0 and ends[2:] == [pytest.approx(2.6)]
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(llm.client.config.model.media.processor_path)
    for one in result.windows:
        part = samples[round(one.start_s * RATE) :][: round(one.duration_s * RATE)]
        (expected,) = extractor(part, sampling_rate=RATE, return_tensors="np").input_features
        # The process has no torch, with which the extractor computes the same in another order.
        assert features_of(one) == pytest.approx(expected, abs=1e-4)


def test_other_rates_are_resampled(llm: LLM) -> None:
    times = np.arange(2 * RATE) / (2 * RATE)
    tone = (0.3 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)
    given = [(tone, 2 * RATE), wav(tone, 2 * RATE), (tone[::2].copy(), RATE)]
    twice, file, plain = (asyncio.run(windows_of(llm, one)).windows for one in given)
    spectra = [features_of(one) for (one,) in (twice, file, plain)]
    assert [one.duration_s for (one,) in (twice, file, plain)] == pytest.approx([1.0] * 3)
    for spectrum in spectra[:2]:  # a tone has little beside its band: the differences are there
        loud = spectra[2] > spectra[2].max() - 0.5
        assert np.abs(spectrum - spectra[2])[loud].max() < 0.05


def test_deaths_of_the_worker_and_the_core(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audio clips are encoded again from their spectrograms."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("OCTAVO_CHECK", "1")

    async def main() -> None:
        async with await AsyncClient.launch(str(path), **SETTINGS, logits_processors=[PLUGIN]) as client:
            params = SAMPLED.clone(speech_rules="timestamps")
            await assert_deaths_change_nothing(client, lambda seed: prompt(seed % 4), params)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"pipeline_parallel_size": 2}, "is 2: cross-attention, which Whisper.* is not divided among workers"),
        ({"tensor_parallel_size": 3}, "is 3: cross-attention"),
        ({"encoder_cache_tokens": 49}, "encoder_cache_tokens 49: one audio clip takes 50"),
        ({"enable_lora": True}, "has no adapters for it"),
        ({"speculative_config": {"method": "draft_model", "model": "PATH"}}, "method draft_model reads tokens"),
        ({"limit_mm_per_prompt": {"audio": 0}}, "limit_mm_per_prompt: audio is 0"),
        ({"limit_mm_per_prompt": {"audio": 1, "image": 2}}, "reads no media of kind 'image'"),
    ],
)
def test_what_cannot_hear_a_sound_does_not_start(path: Path, setting: dict[str, Any], message: str) -> None:
    if drafts := setting.get("speculative_config"):
        drafts["model"] = str(path)
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), **{**SETTINGS, **setting})


def test_a_text_is_aligned_with_a_sound_by_both_kernels(path: Path) -> None:
    async def main(kernels: str) -> list[float]:
        async with await AsyncClient.launch(str(path), **SETTINGS, cpu_kernels=kernels) as client:
            assert isinstance(client.media, AudioPrompts)
            text = list(range(20, 40))
            made = await client.media.of_tokens(text, [MediaSource("audio", (waveform(1), RATE), "file")])
            heads = ((0, 1), (1, 0), (1, 2))
            for spec, message in (
                (AlignmentSpec(((2, 0),), 2, 40), "layers .0, 1. with 3 heads each"),
                (AlignmentSpec(heads, 20, 40), "first must be below the 20 tokens"),
                (AlignmentSpec(heads, 2, 51), "num_rows must be from 1 to 50"),
                (AlignmentSpec(heads, 2, 40, 4), "filter_width must be odd"),
            ):
                with pytest.raises(InvalidRequestError, match=message):
                    await client.pooler.align(text, made.items, spec)
            found = (await client.pooler.align(text, made.items, AlignmentSpec(heads, 2, 40))).array()
            return [float(row) for row in found]

    rows = asyncio.run(main("native"))
    assert len(rows) == 18 and rows == sorted(rows) and rows[-1] <= 39
    assert asyncio.run(main("torch")) == rows
