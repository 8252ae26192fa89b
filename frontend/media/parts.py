"""Takes the images out of a conversation: what the template sees is a mark where each of them was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.text.messages import MediaPart, Message, part_path
from octavo.protocol.errors import InvalidRequestError

_IMAGE_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image", "image_pil": "image_pil"}
"""Types of parts that are images, and the key that has the image: a URL, an object with one, or a picture."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaSource:
    """An image of a request."""

    value: Any
    """A URL, the bytes of a file, a picture of Pillow or an array of numpy."""
    path: str
    """Where the request has it, for errors."""
    uuid: str | None = None
    """The caller's name for it. Images of equal names count as equal, so a known one needs no `value`."""


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """What a request says about all of its images."""

    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the model's processor (`mm_processor_kwargs`)."""
    cache_salt: str | None = None
    """Of the request: uuids of another salt are other ones."""


def has_media(messages: Sequence[Message]) -> bool:
    """Return whether any part of a conversation is an image."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(_image_key(part) for part in parts)


def take_media(messages: Sequence[Message], placeholder: str) -> tuple[list[Message], list[MediaSource]]:
    """Return the messages with marks in place of images, and the images in order.

    Args:
        messages: of the caller; not changed.
        placeholder: the text that stands for an image where a template takes strings.

    Raises:
        InvalidRequestError: an image has no URL.
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
            if (key := _image_key(part)) is not None:
                uuid = _uuid_of(part, path)
                sources.append(MediaSource(_value_of(part, key, path, is_optional=uuid is not None), path, uuid))
                parts.append(MediaPart(placeholder))
            else:
                parts.append(part)
        taken.append({**message, "content": parts})
    return taken, sources


def _image_key(part: Any) -> str | None:
    """Return the key under which a part has its image; None: it is none."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return _IMAGE_PARTS.get(kind) if isinstance(kind, str) else None


def _uuid_of(part: Mapping[str, Any], path: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and uuid):
        raise InvalidRequestError(f"{path}.uuid must be a string that is not empty", path)
    return uuid


def _value_of(part: Mapping[str, Any], key: str, path: str, *, is_optional: bool) -> Any:
    value = part.get(key)
    if isinstance(value, Mapping):
        key, value = f"{key}.url", value.get("url")
    if not is_optional and (value is None or value == ""):
        raise InvalidRequestError(f"{path}.{key} is missing: send a URL, such as data:image/png;base64,...", path)
    return value or None if isinstance(value, str) else value
