"""Settings of media for tests: small limits, and no private addresses."""

from typing import Any

from octavo.protocol.config.media import ResolvedMedia

SETTINGS = {
    "limits": {"image": 4},
    "processor_kwargs": {},
    "max_num_encoder_tokens": 1,
    "encoder_cache_tokens": 1,
    "max_item_tokens": 1000,
    "allowed_local_path": None,
    "allowed_domains": None,
    "allows_private_addresses": False,
    "fetch_timeout_s": 20.0,
    "decode_timeout_s": 20.0,
    "max_file_bytes": 1000,
    "max_image_pixels": 1000,
    "max_audio_s": 20.0,
    "max_video_s": 20.0,
    "max_video_frames": 16,
    "video_frames": 8,
    "video_fps": -1.0,
    "max_live_bytes": 1000,
    "processor_cache_bytes": 0,
}


def media(**changes: Any) -> ResolvedMedia:
    return ResolvedMedia(**{**SETTINGS, **changes})
