"""Compares prompts with images, videos or audio clips, their tokens and logprobs, with `transformers`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_media import picture
from tiny_models import VOCAB_SIZE
from tiny_videos import clip
from tiny_whisper import RATE, waveform

from octavo import LLM, SamplingParams
from octavo.frontend.outputs import RequestOutput

_OF_TEXT = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}
"""Outputs of processors for each token of text, and their values."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)


def prompt(text: str, *images: Any) -> dict[str, Any]:
    """Return a prompt with pictures, given directly, or by seed and optionally size."""
    pictures = [
        picture(*image) if isinstance(image, tuple) else picture(image) if isinstance(image, int) else image
        for image in images
    ]
    return {"prompt": text, "multi_modal_data": {"image": pictures}}


def audio_prompt(text: str, *clips: tuple[int, float]) -> dict[str, Any]:
    """Return a prompt with audio clips, given by (seed, seconds)."""
    return {"prompt": text, "multi_modal_data": {"audio": [(waveform(*one), RATE) for one in clips]}}


def video_prompt(text: str, *videos: tuple[Any, ...], images: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a prompt with videos, given by (seed, frames, height, width, frames per second)."""
    clips = [(clip(*one[:-1]), {"fps": one[-1]}) for one in videos]
    data = {"video": clips, "image": [picture(*one) for one in images] or None}
    return {"prompt": text, "multi_modal_data": data}


def result(output: RequestOutput) -> object:
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs]


def run(llm: LLM, *prompts: Any, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.generate(list(prompts), params, use_tqdm=False)


def compare(
    llm: LLM,
    path: Path,
    kind: Any,
    prompts: list[dict[str, Any]],
    make_processor: Any = None,
    attention: str | None = None,
) -> None:
    """Compare prompts, tokens and logprobs of a model with those that a class of `transformers` gives.

    `make_processor`: makes what stands for the model's processor, from a path; None: that is it.
    `attention`: how `transformers` computes it; None: as it likes.
    """
    processor = (make_processor or transformers.AutoProcessor.from_pretrained)(path)
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()
    for one, output in zip(prompts, run(llm, *prompts), strict=True):
        inputs = processor(text=one["prompt"], return_tensors="pt", **_media(one["multi_modal_data"]))
        length = inputs.input_ids.shape[1]
        assert output.prompt_token_ids == inputs.input_ids[0].tolist()
        assert output.prompt == one["prompt"]
        tokens = list(output.outputs[0].token_ids)
        marks = {place for place, token in enumerate(tokens) if token in (VOCAB_SIZE, VOCAB_SIZE + 1)}
        if marks:  # a placeholder, which would be an item without pixels in what follows
            tokens = tokens[: min(marks) + 1]
        read = tokens[:-1]
        for name, more in (("input_ids", read), *((name, [value] * len(read)) for name, value in _OF_TEXT.items())):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], torch.tensor([more], dtype=torch.int64)], dim=1)
        # Not `generate`: it counts on from the last position of an image at the end on each axis (M-RoPE).
        with torch.inference_mode():
            logprobs = model(**inputs).logits[0, length - 1 :].log_softmax(dim=-1)
        assert logprobs.argmax(dim=-1).tolist() == tokens
        assert len(output.outputs[0].logprobs or []) >= len(tokens) > 0
        for row, token, reported in zip(logprobs, tokens, output.outputs[0].logprobs or [], strict=False):
            assert abs(float(row[token]) - reported[token].logprob) < 1e-4


def _media(data: dict[str, Any]) -> dict[str, Any]:
    """Return media as processors take them."""
    found: dict[str, Any] = {}
    if clips := data.get("audio"):
        found = {"audio": [samples for samples, _ in clips], "sampling_rate": clips[0][1]}
    if clips := data.get("video"):
        found["videos"] = [frames for frames, _ in clips]
        found["video_metadata"] = [
            transformers.video_utils.VideoMetadata(len(frames), **more, frames_indices=list(range(len(frames))))
            for frames, more in clips
        ]
    return {**found, "images": data["image"] or None} if "image" in data else found
