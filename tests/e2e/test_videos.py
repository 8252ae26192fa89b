"""Videos through whole engines: against `transformers`, in storms with preemptions, through deaths, and over HTTP."""

import asyncio
import base64
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import tiny_media
import tiny_videos
import transformers
from engine_kills import assert_deaths_change_nothing
from hung_steps import PLUGIN
from media_compare import GREEDY, compare, result, run, video_prompt
from PIL import Image
from servers import serve
from tiny_videos import clip, clip_file

from octavo import LLM, AsyncClient, SamplingParams
from octavo.frontend.media.smolvlm import allow_smolvlm
from octavo.frontend.media.without_torch import leave_out_videos
from octavo.protocol import restarts
from octavo.protocol.errors import ConfigError, InvalidRequestError

VIDEO, IMAGE = "<|video_pad|>", "<|image_pad|>"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,  # chunks end inside of videos
    "max_num_encoder_tokens": 5,  # frames of one video are encoded in several steps
    "encoder_cache_tokens": 100,
}


class Case(NamedTuple):
    """A family."""

    make: Any
    kind: str
    sizes: tuple[tuple[int, int, int, int], ...]
    """Frames, height, width and frames in a second, of videos that keep their size."""
    marks: tuple[str, str] = (VIDEO, IMAGE)
    row: int = tiny_media.VOCAB_SIZE + 1
    """The token of the rows of videos."""
    has_times: bool = True
    """Whether their times change what the model computes."""
    reads_both: bool = True
    """Whether the model's processor reads images and videos of one prompt."""
    settings: Mapping[str, Any] = MappingProxyType({"num_gpu_blocks_override": 20})


# Times are short enough that text goes on after the longest side of a frame, as `transformers` always has it.
CASES = {
    "qwen2_vl": Case(
        tiny_media.make_qwen2_vl, "Qwen2VL", ((4, 36, 24, 4), (3, 24, 36, 2), (2, 12, 24, 9)), has_times=False
    ),
    "qwen2_5_vl": Case(tiny_media.make_qwen25_vl, "Qwen2_5_VL", ((4, 36, 24, 4), (3, 36, 48, 3), (2, 12, 24, 9))),
    "qwen3_vl": Case(tiny_media.make_qwen3_vl, "Qwen3VL", ((4, 12, 24, 4), (5, 24, 12, 3), (2, 12, 24, 9))),
    "llava_onevision": Case(
        partial(tiny_media.make_llava_next, family="LlavaOnevision"),
        "LlavaOnevision",
        ((4, 18, 18, 4), (4, 18, 18, 2), (1, 18, 18, 1)),
        ("<video>", "<image>"),
        has_times=False,
    ),
    "smolvlm": Case(
        partial(tiny_media.make_smolvlm, family="SmolVLM"),
        "SmolVLM",
        ((4, 24, 24, 4), (4, 24, 24, 1), (2, 24, 24, 9)),
        ("<video>", "<image>"),
        row=tiny_media.VOCAB_SIZE,
        reads_both=False,
        settings={"max_model_len": 512, "num_gpu_blocks_override": 50},
    ),
}


@pytest.fixture(autouse=True)
def _no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_videos(monkeypatch.setattr)
    allow_smolvlm(monkeypatch.setattr)


@pytest.mark.parametrize("name", CASES)
def test_a_family(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and logprobs are those of `transformers`, and have the same bits alone and among others."""
    monkeypatch.setenv("OCTAVO_CHECK", "1")
    case = CASES[name]
    path, (one, other, short), (video, image) = case.make(tmp_path), case.sizes, case.marks
    with LLM(str(path), **{**SETTINGS, **case.settings}) as llm:
        prompts = [
            video_prompt(f"look at {video} here", (1, *one)),
            video_prompt(f"{video}, and {video} again", (2, *short), (2, *short)),
            video_prompt(f"ends with {video}", (5, *other)),
        ]
        if case.reads_both:
            both = f"a {video}, {image} and {video}"
            prompts.append(video_prompt(both, (3, *other), (4, *one), images=[(1, 20, 60)]))
        compare(
            llm, path, getattr(transformers, f"{case.kind}ForConditionalGeneration"), prompts, tiny_videos.processor_of
        )
        storm = [
            video_prompt(
                f"about {video}{'.' * (n // 2)} {image}?", (n % 3, *case.sizes[n % 3]), images=[(n % 2, 30, 30)]
            )
            for n in (place % 6 for place in range(10))
        ]
        params = [
            SamplingParams(temperature=0.9, seed=n, max_tokens=40, logprobs=1, ignore_eos=True) for n in range(10)
        ]
        alone = [result(run(llm, item, params=own)[0]) for item, own in zip(storm, params, strict=True)]
        assert list(map(result, llm.generate(storm, params, use_tqdm=False))) == alone
        assert llm.stats().num_preemptions > 0
        _assert_videos_are_told_apart(llm, case)
        _assert_files_are_read(llm, case)


def _assert_videos_are_told_apart(llm: LLM, case: Case) -> None:
    """The prefix cache finds the blocks of an equal video, and not those of another one, or of other times."""
    size, text = case.sizes[0], f"{'the same words ' * 2}{case.marks[0]}{'and some more of them ' * 3}"
    found = [
        run(llm, video_prompt(text, (seed, *size[:3], fps)))[0] for seed, fps in ((31, 4), (31, 4), (32, 4), (31, 2))
    ]
    first, again, other, slower = found
    assert first.prompt_token_ids == other.prompt_token_ids
    start = (first.prompt_token_ids or []).index(case.row)
    assert (other.num_cached_tokens or 0) <= start + 16 < (again.num_cached_tokens or 0)
    assert result(again) == result(first) != result(other)
    assert (result(slower) != result(first)) == case.has_times


def _assert_files_are_read(llm: LLM, case: Case) -> None:
    size, prompt = case.sizes[0], f"look at {case.marks[0]} here"
    frames = clip(7, *size[:3])
    forms = [
        (frames, {"fps": 4}),
        ([Image.fromarray(frame) for frame in frames], {"fps": 4}),
        clip_file(frames, 4),
    ]
    outputs = run(llm, *[{"prompt": prompt, "multi_modal_data": {"video": one}} for one in forms])
    if case.kind == "SmolVLM":  # knows how long a file is, which the text says
        text = llm.get_tokenizer().decode(outputs.pop().prompt_token_ids or [])
        assert "series of four frames from a 0:00:01 [H:MM:SS] video.\n\nFrame from 00:00:\n" in text
    assert len({str((one.prompt_token_ids, result(one))) for one in outputs}) == 1
    # Of eight frames the processor reads those that are asked for.
    longer = clip_file(clip(8, 8, *size[1:3]), 8)
    asked: dict[str, Any] = {"prompt": prompt, "multi_modal_data": {"video": longer}}
    asked["mm_processor_kwargs"] = {"videos_kwargs": {"num_frames": 4}, "images_kwargs": {"max_pixels": 144}}
    places = [0, 2, 4, 7]
    metadata = {"fps": 8, "frames_indices": places, "total_num_frames": 8}
    same = {"prompt": prompt, "multi_modal_data": {"video": (clip(8, 8, *size[1:3])[places], metadata)}}
    one, other = run(llm, asked, same)
    assert (one.prompt_token_ids or []).count(case.row) == (other.prompt_token_ids or []).count(case.row)
    if case.kind != "SmolVLM":
        assert (one.prompt_token_ids, result(one)) == (other.prompt_token_ids, result(other))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_media.make_qwen25_vl(tmp_path_factory.mktemp("qwen"))
    template = tiny_media.CHAT_TEMPLATE.replace("'image'", "'video'").replace(tiny_media.IMAGE, VIDEO)
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    limits = {"limit_mm_per_prompt": {"video": 1}, "max_video_seconds": 9, "max_video_frames": 8}
    with LLM(str(path), **SETTINGS, **limits, media_io_kwargs={"video": {"num_frames": 4}}) as llm:
        yield llm


def test_conversations(llm: LLM) -> None:
    url = "data:video/x-matroska;base64," + base64.b64encode(clip_file(clip(1), 4)).decode()
    question, results = {"type": "text", "text": "what happens?"}, []
    for part in (
        {"type": "video_url", "video_url": {"url": url}, "uuid": "one"},
        {"type": "video", "video": (clip(1), {"fps": 4})},
        {"type": "video_url", "video_url": None, "uuid": "one"},
    ):
        (output,) = llm.chat([{"role": "user", "content": [part, question]}], GREEDY, use_tqdm=False)
        results.append((output.prompt_token_ids, result(output)))
    assert results[0] == results[1] == results[2]
    assert (results[0][0] or []).count(tiny_media.VOCAB_SIZE + 1) == 12


def test_over_http(path: Path) -> None:
    """The part of a bad video is named, and the server goes on."""
    with serve(path, "--dtype", "float32", "--max-model-len", "256", "--served-model-name", "tiny") as server:
        server.wait_until_ready()

        def ask(data: bytes, kwargs: Any = None, url: str = "") -> Any:
            url = url or "data:video/mp4;base64," + base64.b64encode(data).decode()
            content = [{"type": "text", "text": "see"}, {"type": "video_url", "video_url": {"url": url}}]
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0}
            return server.post("/v1/chat/completions", {**body, "max_tokens": 4, "mm_processor_kwargs": kwargs})

        whole = clip_file(clip(1), 4)
        before = ask(whole).json()
        assert before["usage"]["completion_tokens"] == 4
        for data, kwargs, url, message in (
            (whole[:100], None, "", "it is not a video"),
            (b"ffconcat version 1.0\nfile /etc/passwd\n", None, "", "it is not a video"),
            (tiny_videos.sound_file(has_cover=True), None, "", "it has no pictures"),
            (b"", None, "file:///etc/passwd", "no local files"),
            (whole, {"num_frames": 0}, "", "num_frames is 0"),
            (whole, {"num_frames": 10**30}, "", "mm_processor_kwargs"),
            (whole, {"size": 10**30}, "", "mm_processor_kwargs"),
        ):
            refused = ask(data, kwargs, url)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert message in error["message"]
            assert error["param"] == "messages[0].content[1]"
        assert ask(whole).json()["choices"] == before["choices"]


@pytest.mark.parametrize(
    ("video", "kwargs", "message"),
    [
        (b"?", {}, r"video'\]\[0\]: the video cannot be used: it is not a video"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", {}, "it is not a video"),
        ([clip(1), clip(2)], {}, "the prompt has 2 videos, and the limit is 1"),
        (clip(1, 9), {}, "9 frames, more than 8"),
        (clip_file(clip(1, 20), 2), {}, "longer than 9 seconds"),
        (clip_file(clip(1, 9), 4), {"num_frames": 9}, "9 of its frames would be read, and the limit is 8"),
        (
            clip_file(clip(1, 8, 48, 36), 4),
            {"num_frames": -1, "min_pixels": 10000, "max_pixels": 12000},
            r"has 320 tokens, and the limit is 256 \(--max-model-len\)",
        ),
        (clip_file(clip(1, 2, 48, 36), 4), {"min_pixels": 15000, "max_pixels": 20000}, "encoded together have 1.. tok"),
        (clip(1), {"frames": 2}, "mm_processor_kwargs has frames, and videos know fps"),
        (clip(1), {"videos_kwargs": {"frames": 2}}, "mm_processor_kwargs has frames, and videos know fps"),
        (clip(1), {"audio_kwargs": {}}, "it has audio_kwargs, and the model reads media of kind image and video"),
        (clip(1), {"videos_kwargs": {"fps": 2}}, "all given frames are read"),
        (clip_file(clip(1), 4), {"fps": "x"}, "fps is 'x'"),
        (7, {}, "it is a int; expected a URL"),
        (([], {"fps": 4}), {}, "expected a URL"),
        ((clip(1), {"fps": 1e-6}), {}, "too few for the model's positions"),
        ((clip(1), {"fps": 4, "frames_indices": [1]}), {}, "4 places in order"),
    ],
)
def test_what_is_refused(llm: LLM, video: Any, kwargs: dict[str, Any], message: str) -> None:
    one = {"prompt": VIDEO, "multi_modal_data": {"video": video}, "mm_processor_kwargs": kwargs}
    with pytest.raises(InvalidRequestError, match=message):
        run(llm, one)


@pytest.mark.parametrize("value", ['{"video": {"frames": 2}}', '{"image": {}}', '{"video": {"num_frames": 0}}', "[]"])
def test_settings_of_frames_that_are_refused(path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="media_io_kwargs"):
        LLM(str(path), **SETTINGS, media_io_kwargs=value)


def test_deaths_of_the_worker_and_the_core(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running and waiting requests are computed from their pixels again."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("OCTAVO_CHECK", "1")
    sampled = SamplingParams(temperature=0.9, seed=4, max_tokens=60, ignore_eos=True, logprobs=1)

    async def main() -> None:
        async with await AsyncClient.launch(str(path), **SETTINGS, logits_processors=[PLUGIN]) as client:
            text = f"request {VIDEO} of it."
            await assert_deaths_change_nothing(
                client, lambda seed: video_prompt(text, (seed % 4, 4, 36, 24, 4)), sampled
            )

    asyncio.run(main())
