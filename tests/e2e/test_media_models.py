"""Families of models that read images or clips: each against `transformers`, and in a storm with preemptions."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_audio_models
import tiny_llama4
import tiny_media
import tiny_phi4
import transformers
from media_compare import GREEDY, audio_prompt, compare, prompt, result, run
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from octavo import LLM, SamplingParams
from octavo.frontend.media.pixtral import allow_pixtral
from octavo.frontend.media.smolvlm import allow_smolvlm
from octavo.frontend.media.without_torch import leave_out_videos
from octavo.frontend.model_files.facts import read_model_facts
from octavo.protocol.config import ModelConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError


class Case(NamedTuple):
    """A family."""

    make: Callable[[Path], Path]
    kind: str
    """Name of its class in `transformers`."""
    mark: str = tiny_media.IMAGE
    """Placeholder of an item in a prompt."""
    sizes: tuple[tuple[Any, ...], ...] = ((44, 33), (20, 60), (90, 20), (30, 30))
    """Sizes of pictures in pixels, or lengths of audio clips in seconds."""
    num_blocks: int = 17
    """Number of cache blocks: few, so that requests are preempted and find some of their blocks again."""
    has_hits: bool = True
    """Whether some requests of the storm surely find cached blocks; windows need room for more of them."""
    make_processor: Callable[[Path], Any] | None = None
    """See `compare`."""
    attention: str | None = None
    """See `compare`."""
    prompt: Callable[..., dict[str, Any]] = prompt
    """Makes a prompt from a text and items, each given by a seed and a size."""


_CLIPS: dict[str, Any] = {"sizes": ((0.8,), (0.53,), (1.0,), (0.3,)), "num_blocks": 22, "prompt": audio_prompt}
CASES = {
    "qwen2_audio": Case(
        tiny_audio_models.make_qwen2_audio, "Qwen2AudioForConditionalGeneration", tiny_audio_models.AUDIO, **_CLIPS
    ),
    "voxtral": Case(
        tiny_audio_models.make_voxtral,
        "VoxtralForConditionalGeneration",
        "[AUDIO]",
        make_processor=tiny_audio_models.VoxtralInputs,
        **{**_CLIPS, "sizes": ((0.8,), (1.5,), (1.0,), (0.3,)), "num_blocks": 34},
    ),
    "qwen3_vl_moe": Case(tiny_media.make_qwen3_vl_moe, "Qwen3VLMoeForConditionalGeneration", "<|image_pad|>"),
    "gemma3": Case(
        tiny_media.make_gemma3, "Gemma3ForConditionalGeneration", "<start_of_image>", num_blocks=40, has_hits=False
    ),
    "smolvlm": Case(
        partial(tiny_media.make_smolvlm, family="SmolVLM"), "SmolVLMForConditionalGeneration", num_blocks=30
    ),
    "internvl": Case(tiny_media.make_internvl, "InternVLForConditionalGeneration", "<IMG_CONTEXT>", num_blocks=24),
    "llama4": Case(
        tiny_llama4.make_llama4,
        "Llama4ForConditionalGeneration",
        tiny_llama4.MARK,
        num_blocks=40,
        has_hits=False,
        make_processor=tiny_llama4.Llama4Inputs,
    ),
    "llava_next": Case(tiny_media.make_llava_next, "LlavaNextForConditionalGeneration", num_blocks=20, has_hits=False),
    "llava_onevision": Case(
        partial(tiny_media.make_llava_next, family="LlavaOnevision"),
        "LlavaOnevisionForConditionalGeneration",
        num_blocks=20,
        has_hits=False,
    ),
    "mistral3": Case(tiny_media.make_mistral3, "Mistral3ForConditionalGeneration", "[IMG]"),
    "pixtral": Case(
        partial(tiny_media.make_mistral3, family="Llava"), "LlavaForConditionalGeneration", "[IMG]", has_hits=False
    ),
    "phi4": Case(
        tiny_phi4.make_phi4,
        "Phi4MultimodalForCausalLM",
        tiny_phi4.IMAGE,
        num_blocks=26,
        make_processor=tiny_phi4.Phi4Inputs,
        attention="eager",  # others take a tile without margins as causal
    ),
    "qwen2_vl": Case(tiny_media.make_qwen2_vl, "Qwen2VLForConditionalGeneration", "<|image_pad|>"),
    "qwen3_vl": Case(tiny_media.make_qwen3_vl, "Qwen3VLForConditionalGeneration", "<|image_pad|>"),
    "qwen2_5_vl": Case(tiny_media.make_qwen25_vl, "Qwen2_5_VLForConditionalGeneration", "<|image_pad|>"),
}
SHORT = ("llava_onevision", "mistral3", "qwen2_5_vl", "qwen3_vl_moe", "voxtral")
"""Families whose storm only `--long` runs: llava_next, pixtral, qwen2_vl, qwen3_vl and qwen2_audio share their code."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,  # chunks end inside of images
    "encoder_cache_tokens": 100,
}


@pytest.fixture(autouse=True)
def _no_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapt `transformers`: no videos, which need torchvision, and an attribute that it lacks."""
    leave_out_videos(monkeypatch.setattr)
    allow_pixtral(monkeypatch.setattr)
    allow_smolvlm(monkeypatch.setattr)
    # Llama 4 reads it of the result of its language model, which lacks it (5.24).
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)


@pytest.mark.parametrize("name", CASES)
def test_a_family(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Tokens and logprobs are those of `transformers`, and have the same bits alone and among others."""
    monkeypatch.setenv("OCTAVO_CHECK", "1")
    case = CASES[name]
    path, mark, sizes, prompt = case.make(tmp_path), case.mark, case.sizes, case.prompt
    with LLM(str(path), **SETTINGS, num_gpu_blocks_override=case.num_blocks) as llm:
        prompts = [
            prompt(f"look at {mark} here", (1, *sizes[0])),
            prompt(f"{mark}, and {mark} again", (2, *sizes[1]), (2, *sizes[1])),
            prompt(f"one {mark} and {mark}, a third {mark} of them", *[(n, *sizes[n]) for n in (1, 2, 3)]),
            prompt(f"ends with {mark}", (4, *sizes[0])),
            prompt("no item at all"),
        ]
        compare(llm, path, getattr(transformers, case.kind), prompts, case.make_processor, case.attention)
        _assert_items_are_told_apart(llm, case)
        if name in SHORT and not request.config.getoption("--long"):
            return
        storm = [
            prompt(f"about {mark}{'.' * (n // 2)} {mark}?", (n % 3, *sizes[n % 2]), (n // 2, *sizes[n // 2 % 4]))
            for n in (place % 6 for place in range(12))
        ]
        params = [
            SamplingParams(temperature=0.9, seed=n, max_tokens=40, logprobs=1, ignore_eos=True) for n in range(12)
        ]
        alone = [result(run(llm, one, params=own)[0]) for one, own in zip(storm, params, strict=True)]
        together = llm.generate(storm, params, use_tqdm=False)
        assert list(map(result, together)) == alone
        assert not case.has_hits or any(output.num_cached_tokens for output in together)
        assert llm.stats().num_preemptions > 0
        assert len({str(one) for one in alone}) == len(alone)
        assert [result(one) for one in run(llm, *prompts)] == [
            result(run(llm, one, params=GREEDY)[0]) for one in prompts
        ]


def _assert_items_are_told_apart(llm: LLM, case: Case) -> None:
    """Check that the prefix cache finds the blocks of an equal item, but not of another item with equal tokens."""
    text = f"{'the same words ' * 4}{case.mark}{'and then some more of them ' * 3}"
    first, again, other = (run(llm, case.prompt(text, (seed, *case.sizes[-1])))[0] for seed in (31, 31, 32))
    assert first.prompt_token_ids == other.prompt_token_ids
    assert result(again) == result(first) != result(other)
    start = (first.prompt_token_ids or []).index(tiny_media.VOCAB_SIZE)
    assert (other.num_cached_tokens or 0) <= start < (again.num_cached_tokens or 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds: Qwen3VL.* reads rows of images in several layers"),
        ({"pipeline_parallel_size": 2}, "the first 2 layers read rows of images, and the first stage has 1"),
    ],
)
def test_what_cannot_add_rows_in_deeper_layers_does_not_start(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_media.make_qwen3_vl(tmp_path)), **SETTINGS, **settings)


@pytest.mark.parametrize(("text", "window"), [({"sliding_window": None}, None), ({"sliding_window": 8}, 8)])
def test_a_text_model_has_the_window_that_its_file_gives(tmp_path: Path, text: dict[str, Any], window: Any) -> None:
    path = tiny_media.make_mistral3(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= text
    (path / "config.json").write_text(json.dumps(config))
    assert read_model_facts(ModelConfig(model=str(path)), Env.read()).hf_config["sliding_window"] == window
