"""The kinds of media that become rows of a prompt, and what differs between images, videos and audio clips."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.frontend.audio.samples import is_pair, samples_of
from octavo.frontend.audio.voxtral import rows_per_window
from octavo.frontend.audio.wire import SILENCE, AudioProcessorJob, AudioProcessorSetup
from octavo.frontend.media.clips import is_one_video, video_job
from octavo.frontend.media.download import MediaError
from octavo.frontend.media.images import image_job
from octavo.frontend.media.wire import Job, Setup, VideoSetup
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.config.facts import MediaFacts
from octavo.protocol.config.media import DEFAULT_ITEM_TOKENS, ResolvedMedia
from octavo.protocol.media import Kind
from octavo.protocol.media_kwargs import kwargs_of


@dataclass(frozen=True, slots=True)
class MediaKind:
    """How one kind of media is decoded and processed."""

    module: str
    """Python module that the processes run."""
    hint: str
    """Tells the operator what to do if the processes cannot load what they need."""
    setup: Callable[[ResolvedConfig], msgspec.Struct]
    """Returns the first message to a process."""
    job: Callable[[Any, Mapping[str, Any], ResolvedMedia], msgspec.Struct]
    """Returns the job of an item, given its value, further arguments of the processor, and limits. May take long.

    Raises:
        MediaError: the value is not an item of this kind."""
    is_one: Callable[[Any], bool] = lambda value: not isinstance(value, list | tuple)
    """Returns whether a value of `multi_modal_data` is one item, rather than several."""
    empty: Callable[[], msgspec.Struct] | None = None
    """Returns the job of an empty item, which is exempt from limits. `None`: callers cannot send rows of this kind."""


def token_id_of(facts: MediaFacts, kind: Kind) -> int:
    """Return the token id of the placeholder of a row of this kind."""
    token_id = facts.token_ids[kind]
    assert token_id is not None, "rows of prompts"
    return token_id


def _of_images(config: ResolvedConfig) -> Setup:
    assert config.media is not None and config.model.media is not None, "a model that reads images"
    return Setup(
        os.getpid(),
        config.model.media.processor_path,
        config.model.trust_remote_code,
        token_id_of(config.model.media, "image"),
        config.media.max_image_pixels,
        kwargs_of(config.media.processor_kwargs, "image", config.model.media.token_ids),
        config.model.media.architecture,
        is_alone=config.media.vector_width > 0,
    )


def _of_audio(config: ResolvedConfig) -> AudioProcessorSetup:
    assert config.media is not None and config.model.media is not None, "a model that reads audio"
    return AudioProcessorSetup(
        os.getpid(),
        config.model.media.processor_path,
        config.model.trust_remote_code,
        token_id_of(config.model.media, "audio"),
        config.media.max_audio_s,
        rows_per_window(config.model.media),
        config.max_model_len if rows_per_window(config.model.media) else _most_rows(config.media),
        config.model.media.architecture,
    )


def _most_rows(media: ResolvedMedia) -> int:
    """Return the maximum number of rows of an audio clip. One step encodes the complete clip while other requests
    wait.
    """
    return min(media.max_item_tokens, max(media.max_num_encoder_tokens, DEFAULT_ITEM_TOKENS))


def _of_videos(config: ResolvedConfig) -> VideoSetup:
    media, facts = config.media, config.model.media
    assert media is not None and facts is not None, "a model that reads videos"
    has_times = facts.architecture.startswith("Qwen2_5_VL")
    return VideoSetup(
        os.getpid(),
        facts.processor_path,
        config.model.trust_remote_code,
        token_id_of(facts, "video"),
        kwargs_of(media.processor_kwargs, "video", facts.token_ids),
        media.max_image_pixels,
        media.max_video_s,
        media.max_video_frames,
        media.video_frames,
        media.video_fps,
        facts.architecture,
        config.max_model_len,
        media.max_item_tokens,
        facts.hf_config["vision_config"].get("tokens_per_second", 4) if has_times else 0.0,
        facts.architecture.startswith("Qwen3VL"),
    )


def _audio_job(value: Any, processor_kwargs: Mapping[str, Any], media: ResolvedMedia) -> AudioProcessorJob:
    if processor_kwargs:
        raise MediaError(
            f"mm_processor_kwargs has {', '.join(sorted(processor_kwargs))}, and audio clips take none: put "
            "arguments of other media into images_kwargs or videos_kwargs"
        )
    return AudioProcessorJob(*samples_of(value))


def _empty_picture() -> Job:
    width, height = 256, 192
    return Job(bytes(width * height * 3), (width, height), {})


def _silence() -> AudioProcessorJob:
    return AudioProcessorJob(b"", SILENCE)


KINDS: dict[Kind, MediaKind] = {
    "image": MediaKind(
        "octavo.frontend.media.process",
        "images need pip install 'octavo[image]', and the model's processor files",
        _of_images,
        image_job,
        empty=_empty_picture,
    ),
    "video": MediaKind(
        "octavo.frontend.media.videos",
        "videos need pip install 'octavo[video]', and the model's processor files",
        _of_videos,
        video_job,
        is_one_video,
    ),
    "audio": MediaKind(
        "octavo.frontend.audio.prompt_process",
        "audio needs pip install 'octavo[audio]', and the model's processor files",
        _of_audio,
        _audio_job,
        lambda value: not isinstance(value, list | tuple) or is_pair(value),
        _silence,
    ),
}
