"""Images and other media in prompts: the user's settings, and their resolved form."""

import json
import logging
import re
from math import inf
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct

from octavo.protocol.config.facts import MediaFacts, ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.protocol.media import Kind
from octavo.protocol.media_kwargs import BY_KIND, kwargs_fault

logger = logging.getLogger(__name__)

MAX_ITEMS = 64
"""Most items in one prompt. The number of buffers per message is limited."""
_OLD_COUNTS = re.compile(r"[a-z]+=\d+(,[a-z]+=\d+)*")
DEFAULT_CACHE_TOKENS = 16_384
DEFAULT_VIDEO_FRAMES = 32
"""Number of frames read from a video file, as in vLLM."""
DEFAULT_ITEM_TOKENS = 4096
"""Most tokens of an item of any size, unless a step encodes more. Workers reserve memory for it, and others wait for
it."""


_ON_GPUS = frozenset(
    {
        "CLIPModel",
        "ColQwen2ForRetrieval",
        "Gemma3ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Phi4MultimodalForCausalLM",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "SiglipModel",
        "SmolVLMForConditionalGeneration",
        "VoxtralForConditionalGeneration",
        "WhisperForConditionalGeneration",
    }
)
"""Architectures whose encoders and language models `tests/gpu/pipeline` compares with a CPU."""
_ONLY_ON_CPUS: dict[str, str] = {
    "ColPaliForRetrieval": "attends in both directions to rows of images, which has not been tried there",
}
"""Why other architectures are rejected."""


class MediaConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images, videos and audio in prompts, for models that read them."""

    limit_mm_per_prompt: Annotated[
        dict[str, Any] | str | None,
        Meta(description=f'JSON: most items of a kind in a prompt: {{"image": 4, "video": 1}}. Default: {MAX_ITEMS}.'),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | str | None,
        Meta(
            description="JSON with arguments for the model's processor, which override those of its own files. Those "
            "in images_kwargs and videos_kwargs apply only to these media."
        ),
    ] = None
    max_num_encoder_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Most media tokens that one step encodes. A larger item is encoded alone: images of any size "
            "up to 4096 tokens, others up to --encoder-cache-tokens. Windows of an audio clip and frames "
            "of a video are items; small ones are combined up to 512 tokens. Default: "
            "--max-num-batched-tokens."
        ),
    ] = None
    encoder_cache_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Number of encoded media tokens that workers cache, so that a repeated item is not encoded "
            "again. Larger items are rejected.",
        ),
    ] = DEFAULT_CACHE_TOKENS
    enable_mm_embeds: Annotated[
        bool,
        Meta(
            description="Accept precomputed media rows: image_embeds and audio_embeds. Any vectors of the right size "
            "can be sent, including ones that no encoder outputs."
        ),
    ] = False
    allowed_local_media_path: Annotated[
        str | None, Meta(description="Directory whose files requests may name in file:// URLs. Default: none.")
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        Meta(description="Hosts that media URLs may name. Default: all with a public address; [] for none."),
    ] = None
    allow_private_media_addresses: Annotated[
        bool,
        Meta(
            description="Fetch media from private and loopback addresses too, so that requests reach internal servers."
        ),
    ] = False
    media_fetch_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=600)],
        Meta(description="Time limit in seconds for a media download."),
    ] = 10.0
    media_decode_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=600)],
        Meta(description="Time limit in seconds for decoding and processing an item; then the process is killed."),
    ] = 30.0
    max_media_file_bytes: Annotated[
        int,
        Meta(ge=1, description="Largest image, video or audio file (32M), in a request, a download or on disk."),
    ] = 32 * 2**20
    max_image_pixels: Annotated[
        int, Meta(ge=1, description="Most pixels of an image; checked before it is decoded.")
    ] = 2**25
    max_audio_seconds: Annotated[
        float, Meta(gt=0, le=86_400, description="Longest audio clip (3600 seconds); checked while it is decoded.")
    ] = 3600.0
    max_video_seconds: Annotated[
        float, Meta(gt=0, le=86_400, description="Longest video file (3600 seconds); checked before it is decoded.")
    ] = 3600.0
    max_video_frames: Annotated[
        int, Meta(ge=1, description="Most frames read from a video (768); checked before it is decoded.")
    ] = 768
    media_io_kwargs: Annotated[
        dict[str, Any] | str | None,
        Meta(
            description='JSON: which frames of a video file are read: {"video": {"num_frames": 32, "fps": 2}}. Frames'
            " are equidistant: at most num_frames (32 by default, -1 for all), and at most fps per second "
            "(-1 for no limit, the default). Default for SmolVLM: video_sampling of its own files."
        ),
    ] = None
    mm_processor_cache_gb: Annotated[
        float,
        Meta(ge=0, description="GiB of processed media that an HTTP process caches for later requests; 0: none."),
    ] = 0.25
    max_media_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description="Most bytes of processed media of all live requests in an HTTP process (1G); more requests "
            "are rejected with 503.",
        ),
    ] = 2**30


class ResolvedMedia(Struct, frozen=True, kw_only=True):
    """Media of a running engine."""

    limits: dict[Kind, int]
    """Most items per prompt, for each kind that the model reads."""
    processor_kwargs: dict[str, Any]
    max_num_encoder_tokens: int
    encoder_cache_tokens: int
    max_item_tokens: int
    """Rows of the largest item, for which workers reserve memory."""
    allowed_local_path: str | None
    allowed_domains: list[str] | None
    """None if all hosts are allowed."""
    allows_private_addresses: bool
    fetch_timeout_s: float
    decode_timeout_s: float
    max_file_bytes: int
    max_image_pixels: int
    max_audio_s: float
    max_video_s: float
    max_video_frames: int
    video_frames: int
    """Number of frames read from a video file; -1 for all; 0 for the default of the model's processor, or 32."""
    video_fps: float
    """Number of frames read per second, limited by `video_frames`; 0 or less means `video_frames` in total."""
    max_live_bytes: int
    processor_cache_bytes: int
    takes_embeds: bool = False
    """Whether callers may send precomputed rows."""
    attended_rows: int = 0
    vector_width: int = 0
    aligned_layers: list[int] = []
    """See `MediaFacts`."""


# long: a line for each field
def resolve_media(
    config: MediaConfig,
    facts: ModelFacts,
    max_num_batched_tokens: int,
    device: str,
    num_workers: int = 1,
    *,
    max_num_seqs: int = 1,
    max_chunk: int = 0,
    num_stages: int = 1,
) -> ResolvedMedia | None:
    """Return the resolved media settings. Return None if the model reads only text.

    `max_chunk`: most prompt tokens that one step computes; 0: no limit.

    Raises:
        ConfigError: a setting is invalid, or the device or several workers cannot encode media.
    """
    if facts.media is None:
        default = MediaConfig()
        for name in config.__struct_fields__:
            if getattr(config, name) != getattr(default, name):
                flag = name.replace("_", "-")
                logger.warning("--%s has no effect: %s reads text only", flag, facts.architecture)
        return None
    if device != "cpu":
        _check_gpu(facts.media.architecture)
    rows = facts.media.attended_rows
    if rows and num_workers > 1:
        raise ConfigError(
            f"tensor_parallel_size times pipeline_parallel_size is {num_workers}: cross-attention, which "
            f"{facts.architecture} has, is not divided among workers",
            hint="use --data-parallel-size for several engines",
        )
    if config.encoder_cache_tokens < rows:
        raise ConfigError(
            f"encoder_cache_tokens {config.encoder_cache_tokens}: one audio clip takes {rows}",
            hint=f"use --encoder-cache-tokens {rows} or more",
        )
    if config.enable_mm_embeds and (rows or facts.media.vector_width):
        raise ConfigError(
            f"enable_mm_embeds: {facts.media.architecture} has no rows of media in its prompts",
            hint="leave --enable-mm-embeds out",
        )
    if facts.media.vector_width and num_stages > 1:
        raise ConfigError(
            f"pipeline_parallel_size {num_stages}: image vectors cannot pass between the pipeline stages of "
            f"{facts.architecture}",
            hint="use --data-parallel-size for several engines",
        )
    _check_whole_images(facts.media, max_num_batched_tokens, max_num_seqs, max_chunk)
    video_frames, video_fps = _sampling(config)
    max_encoded = config.max_num_encoder_tokens or max_num_batched_tokens
    if facts.media.vector_patches:  # an image has one row, regardless of its cost
        max_encoded = max(1, max_encoded // facts.media.vector_patches)
    largest = max(max_encoded, DEFAULT_ITEM_TOKENS) if facts.media.has_any_size else config.encoder_cache_tokens
    return ResolvedMedia(
        limits=_limits(_counts(config.limit_mm_per_prompt), facts.media),
        processor_kwargs=_processor_kwargs(config, facts.media),
        max_num_encoder_tokens=max_encoded,
        encoder_cache_tokens=config.encoder_cache_tokens,
        max_item_tokens=min(config.encoder_cache_tokens, largest),
        allowed_local_path=config.allowed_local_media_path,
        allowed_domains=config.allowed_media_domains,
        allows_private_addresses=config.allow_private_media_addresses,
        fetch_timeout_s=config.media_fetch_timeout,
        decode_timeout_s=config.media_decode_timeout,
        max_file_bytes=config.max_media_file_bytes,
        max_image_pixels=config.max_image_pixels,
        max_audio_s=config.max_audio_seconds,
        max_video_s=config.max_video_seconds,
        max_video_frames=config.max_video_frames,
        video_frames=video_frames,
        video_fps=video_fps,
        max_live_bytes=config.max_media_bytes,
        processor_cache_bytes=int(config.mm_processor_cache_gb * 2**30),
        takes_embeds=config.enable_mm_embeds,
        attended_rows=facts.media.attended_rows,
        vector_width=facts.media.vector_width,
        aligned_layers=facts.media.aligned_layers if device == "cpu" else [],
    )


def _check_gpu(architecture: str) -> None:
    """Check that a model that reads media runs on GPUs.

    Raises:
        ConfigError: it does not.
    """
    if architecture not in _ON_GPUS:
        reason = _ONLY_ON_CPUS.get(architecture, "has not been tried there")
        raise ConfigError(f"{architecture} does not run on GPUs: it {reason}", hint="use --device cpu")


def _check_whole_images(media: MediaFacts, budget: int, max_num_seqs: int, max_chunk: int) -> None:
    """Check that a step has room for an image that it must compute completely, in addition to the decodes of all
    requests.

    Raises:
        ConfigError: there is not enough room.
    """
    rows = media.both_ways_rows
    if rows and 0 < max_chunk < rows:
        raise ConfigError(
            f"long_prefill_token_threshold {max_chunk}: a step of {media.architecture} computes whole images of {rows} "
            "tokens",
            hint=f"use --long-prefill-token-threshold {rows} or more",
        )
    if rows and (least := max_num_seqs + rows) > budget:
        raise ConfigError(
            f"max_num_batched_tokens {budget}: a step of {media.architecture} computes whole "
            f"images of {rows} tokens beside one token of each of {max_num_seqs} requests",
            hint=f"use --max-num-batched-tokens {least} or more, or a smaller --max-num-seqs",
        )


def _json(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value or {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is not a JSON object: {value!r}", hint='write {"image": 4}')
    return found


def _processor_kwargs(config: MediaConfig, media: MediaFacts) -> dict[str, Any]:
    given = _json("mm_processor_kwargs", config.mm_processor_kwargs)
    if fault := kwargs_fault(given, media.token_ids):
        raise ConfigError(
            f"mm_processor_kwargs: {fault}",
            hint='use {"max_pixels": 1003520} for all media, {"images_kwargs": {...}} or {"videos_kwargs": {...}}',
        )
    if (given and media.token_ids.keys() == {"audio"}) or given.get(BY_KIND["audio"]):
        raise ConfigError(
            f"mm_processor_kwargs: the processor of {media.architecture} takes no arguments for audio",
            hint="leave it out",
        )
    return given


def _sampling(config: MediaConfig) -> tuple[int, float]:
    """Return how many frames to read from a video file, and per second.

    Raises:
        ConfigError: the setting contains anything else.
    """
    given = _json("media_io_kwargs", config.media_io_kwargs)
    video = given.get("video", {})
    known = {"num_frames": DEFAULT_VIDEO_FRAMES if video else 0, "fps": -1}
    is_known = not given.keys() - {"video"} and isinstance(video, dict) and not video.keys() - known.keys()
    found = {**known, **video} if is_known else known
    frames, fps = found["num_frames"], found["fps"]
    is_number = type(fps) in (int, float) and abs(fps) < inf
    if not is_known or not is_number or type(frames) is not int or frames < -1 or (video and not frames):
        raise ConfigError(
            f"media_io_kwargs is {given!r}",
            hint='use {"video": {"num_frames": 32, "fps": 2}}, one of them or both; -1 for all frames',
        )
    return frames, float(fps)


def _counts(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return limits by kind. "image=4,audio=2", as in earlier releases of vLLM, means the same as JSON."""
    if isinstance(value, str) and _OLD_COUNTS.fullmatch(value):
        return {kind: int(count) for kind, _, count in (one.partition("=") for one in value.split(","))}
    return _json("limit_mm_per_prompt", value)


def _limits(given: dict[str, Any], media: MediaFacts) -> dict[Kind, int]:
    """Return the limit of each kind that the model reads. A value may be an object with a "count", as in vLLM.

    A model with cross-attention to audio accepts one audio item per prompt, whatever the limit.
    """
    limits = dict.fromkeys(media.token_ids, 1 if media.attended_rows else MAX_ITEMS)
    least = 1 if media.attended_rows else 0
    for name, value in given.items():
        count = value.get("count") if isinstance(value, dict) else value
        if type(count) is not int or count < 0 or (name in limits and not least <= count <= MAX_ITEMS):
            raise ConfigError(
                f"limit_mm_per_prompt: {name} is {value!r}", hint=f"use a number from {least} to {MAX_ITEMS}"
            )
        kind = next((kind for kind in limits if kind == name), None)
        if kind is not None:
            limits[kind] = count
        elif name not in get_args(Kind) or count:
            raise ConfigError(
                f"limit_mm_per_prompt: this model reads no media of kind {name!r}", hint=f"use {' or '.join(limits)}"
            )
    return limits
