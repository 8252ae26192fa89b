"""Extracts the media of a conversation; the chat template sees a placeholder in place of each item."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.media.precomputed import KEYS as PRECOMPUTED_KEYS
from octavo.frontend.media.precomputed import precomputed_part
from octavo.frontend.text.messages import MediaPart, Message, part_path
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import Kind

NOUNS: dict[Kind, str] = {"image": "image", "video": "video", "audio": "audio clip"}

_PARTS: dict[str, tuple[Kind, str]] = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "image"),
    "image_pil": ("image", "image_pil"),
    "video_url": ("video", "video_url"),
    "video": ("video", "video"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "audio": ("audio", "audio"),
    "image_embeds": ("image", PRECOMPUTED_KEYS["image"]),
    "audio_embeds": ("audio", PRECOMPUTED_KEYS["audio"]),
}
"""Message part types that hold media: their kind, and the key of the item (a URL, an object with a URL, or data)."""
_EXAMPLES: dict[Kind, str] = {
    "image": "data:image/png;base64,...",
    "video": "data:video/mp4;base64,...",
    "audio": "data:audio/wav;base64,...",
}


@dataclass(frozen=True, slots=True, eq=False)
class MediaSource:
    """An image, a video or an audio clip of a request."""

    kind: Kind
    value: Any
    """A URL, the bytes of a file, or another value that `MediaKind.job` accepts."""
    path: str
    """Path of the item in the request, for errors."""
    uuid: str | None = None
    """The caller's name for the item. Items with the same uuid count as equal, so a known item needs no `value`."""


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Settings of a request for all of its media."""

    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the model's processor (`mm_processor_kwargs`)."""
    cache_salt: str | None = None
    """Salt of the request. Items with the same uuid but another salt are different."""


def media_parts(messages: Sequence[Message]) -> Iterator[tuple[Kind, str]]:
    """Yield the kind and the path of each media part of a conversation."""
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if (found := _kind_and_key(part)) is not None:
                yield found[0], part_path(part, f"messages[{place}].content[{index}]")


def take_media(
    messages: Sequence[Message], placeholders: Mapping[Kind, str]
) -> tuple[list[Message], list[MediaSource]]:
    """Return the messages with placeholders in place of media, and the media in order.

    Args:
        messages: messages of the caller; not changed. They contain only kinds that `placeholders` has.
        placeholders: text that stands for an item of each kind, for templates that take strings.

    Raises:
        InvalidRequestError: an item has no URL.
    """
    sources: list[MediaSource] = []
    taken: list[Message] = []
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, Sequence) or isinstance(content, str):
            taken.append(message)
            continue
        parts: list[Any] = []
        for index, part in enumerate(content):
            path = part_path(part, f"messages[{place}].content[{index}]")
            if (found := _kind_and_key(part)) is None:
                parts.append(part)
                continue
            kind, key = found
            uuid = _uuid_of(part, path)
            value = _value_of(part, kind, key, path, is_optional=uuid is not None)
            sources.append(MediaSource(kind, value, path, uuid))
            parts.append(MediaPart(kind, placeholders[kind]))
        taken.append({**message, "content": parts})
    return taken, sources


def _kind_and_key(part: Any) -> tuple[Kind, str] | None:
    """Return the kind of a part and the key of its item. `None` if the part is not media."""
    name = part.get("type") if isinstance(part, Mapping) else None
    return _PARTS.get(name) if isinstance(name, str) else None


def _uuid_of(part: Mapping[str, Any], path: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and uuid):
        raise InvalidRequestError(f"{path}.uuid must be a string that is not empty", path)
    return uuid


def _value_of(part: Mapping[str, Any], kind: Kind, key: str, path: str, *, is_optional: bool) -> Any:
    value = part.get(key)
    if key in PRECOMPUTED_KEYS.values():
        if value is None and not is_optional:
            example = "base64 of a safetensors file with one tensor, or of what torch.save writes"
            raise InvalidRequestError(f"{path}.{key} is missing: send {example}", path)
        return precomputed_part(value, key, path)
    if key == "input_audio" and not (value is None and is_optional):
        return _data_url(value, f"{path}.{key}", path)
    if isinstance(value, Mapping):
        key, value = f"{key}.url", value.get("url")
    if not is_optional and (value is None or (isinstance(value, str) and not value)):
        raise InvalidRequestError(f"{path}.{key} is missing: send a URL, such as {_EXAMPLES[kind]}", path)
    return value or None if isinstance(value, str) else value


def _data_url(value: Any, field: str, path: str) -> str:
    """Return the data URL of an audio clip in OpenAI's form: base64, and a format, which is not needed to decode
    the file.
    """
    data = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(data, str) or not data:
        raise InvalidRequestError(f'{field} must be {{"data": the base64 of a file, "format": "wav"}}', path)
    return f"data:audio;base64,{data}"
