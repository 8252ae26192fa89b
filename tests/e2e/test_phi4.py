"""Phi-4-multimodal: clips, images and clips in one prompt, and the adapters that its files have for them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from media_compare import GREEDY, compare, prompt, result, run
from tiny_media import picture
from tiny_models import VOCAB_SIZE
from tiny_phi4 import AUDIO, IMAGE, Phi4Inputs, make_phi4, write_media_adapters
from tiny_whisper import RATE, waveform

from octavo import LLM, SamplingParams
from octavo.protocol.errors import ConfigError, InvalidRequestError

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,  # chunks end inside of items
    "encoder_cache_tokens": 100,
}


def mixed(text: str, pictures: list[tuple[int, ...]], clips: list[tuple[int, float]]) -> dict[str, Any]:
    """Return a prompt with pictures and clips, given by their seeds and sizes."""
    data: dict[str, Any] = {}
    if pictures:
        data["image"] = [picture(*one) for one in pictures]
    if clips:
        data["audio"] = [(waveform(*one), RATE) for one in clips]
    return {"prompt": text, "multi_modal_data": data}


# transformers encodes the silence that makes shorter clips as long as the longest, so those of a prompt are equal.
CLIPS = [
    mixed(f"listen to {AUDIO} here", [], [(1, 0.8)]),
    mixed(f"{AUDIO}, and {AUDIO}", [], [(2, 0.5), (3, 0.5)]),
]
IMAGES = [mixed(f"look at {IMAGE} here", [(1, 44, 33)], []), mixed(f"{IMAGE}{IMAGE}", [(2, 20, 60), (3, 30, 30)], [])]
BOTH = [
    mixed(f"{IMAGE} and {AUDIO} together", [(1, 44, 33)], [(1, 0.8)]),
    mixed(f"first {AUDIO}, then {IMAGE}, then {AUDIO}", [(2, 90, 20)], [(1, 0.8), (4, 0.8)]),
]
TEXT = prompt("no item at all")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_phi4(tmp_path_factory.mktemp("phi4"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), **SETTINGS, num_gpu_blocks_override=17) as llm:
        yield llm


def test_audio_and_images(llm: LLM, path: Path) -> None:
    kind = transformers.Phi4MultimodalForCausalLM
    compare(llm, path, kind, [*CLIPS, *IMAGES, *BOTH, TEXT], Phi4Inputs, "eager")


def test_a_storm(llm: LLM) -> None:
    """Requests have the same bits alone and among others, also those whose clip is that of another one with images."""
    storm = [
        mixed(f"{IMAGE * (n % 3)} {AUDIO * (n % 2)}.", [(n % 4, 44, 33)] * (n % 3), [(n % 3, 0.4)] * (n % 2))
        for n in range(12)
    ]
    params = [SamplingParams(temperature=0.9, seed=n, max_tokens=30, logprobs=1, ignore_eos=True) for n in range(12)]
    alone = [result(run(llm, one, params=own)[0]) for one, own in zip(storm, params, strict=True)]
    assert list(map(result, llm.generate(storm, params, use_tqdm=False))) == alone
    assert llm.stats().num_preemptions > 0


def test_a_sound_of_several_windows(path: Path) -> None:
    """Forty seconds and more: each window of 500 rows is encoded apart."""
    with LLM(str(path), **{**SETTINGS, "max_model_len": 1024, "encoder_cache_tokens": 700}) as llm:
        prompts = [mixed(f"long: {AUDIO}", [], [(1, 41.0)])]
        compare(llm, path, transformers.Phi4MultimodalForCausalLM, prompts, Phi4Inputs, "eager")


def test_what_is_refused(llm: LLM) -> None:
    for audio, message in (
        ((np.zeros(100, dtype=np.float32), RATE), "100 samples, too few for a token"),
        ((waveform(1, 9.0), RATE), "it has 113 tokens, and the limit is 100"),
        (b"no audio", "not audio"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            run(llm, {"prompt": AUDIO, "multi_modal_data": {"audio": audio}})
    for one, message in (
        ({**IMAGES[0], "mm_processor_kwargs": {"size": 3}}, "has size, and the model's processor knows dynamic_hd"),
        (mixed(IMAGE, [(1, 2000, 3)], []), "too long and too thin"),
        (mixed(IMAGE, [], [(1, 0.5)]), "0 placeholders of audio clips for 1 audio clips"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            run(llm, one)


def test_adapters_are_chosen_by_media(tmp_path: Path) -> None:
    """Images have that of images, with clips too; clips alone have their own, and text has none."""
    path = make_phi4(tmp_path)
    plain = transformers.Phi4MultimodalForCausalLM.from_pretrained(path)
    merged = write_media_adapters(path)
    with pytest.raises(ConfigError, match="max_lora_rank 16: the model's own adapters for media have rank 21"):
        LLM(str(path), **SETTINGS, enable_lora=True, max_lora_rank=16)
    with LLM(str(path), **SETTINGS) as llm:
        for model, prompts in ((merged["image"], [*IMAGES, *BOTH]), (merged["audio"], CLIPS), (plain, [TEXT])):
            kind = SimpleNamespace(from_pretrained=lambda *_, model=model, **__: model.eval())
            compare(llm, path, kind, prompts, Phi4Inputs)
        alone = [result(run(llm, one)[0]) for one in (*CLIPS, *IMAGES, *BOTH, TEXT)]
        assert [result(one) for one in run(llm, *CLIPS, *IMAGES, *BOTH, TEXT)] == alone
        first = run(llm, IMAGES[0], params=GREEDY)[0]
        assert (first.prompt_token_ids or []).count(VOCAB_SIZE) and first.num_cached_tokens
