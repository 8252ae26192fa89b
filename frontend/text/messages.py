"""Converts messages of the OpenAI API to the form that chat templates expect. Renders nothing.

Errors name the invalid part of a message by its path: `messages[3].content[0].type`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from octavo.protocol.errors import InvalidRequestError

Message: TypeAlias = Mapping[str, Any]
"""A message of the OpenAI API: role, content (a string, a list of parts or None) and more."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, each with the key of its text."""
_MEDIA_PARTS = {
    "image_url": "images", "input_image": "images", "image": "images",
    "input_audio": "audio", "audio_url": "audio", "audio": "audio",
    "video_url": "video", "video": "video", "file": "files", "input_file": "files",
}  # fmt: skip
"""Types of parts that other servers support, with a description of their content."""


class SourcePart(dict[str, Any]):
    """A media item of another API, in the form of chat completions.

    Args:
        path: path of the part in the request, for errors.
        **fields: the fields of the part.
    """

    def __init__(self, path: str, /, **fields: Any) -> None:
        super().__init__(fields)
        self.path = path


class MediaPart(dict[str, Any]):
    """Replaces a media item that was taken out of a message. Only the server creates it.

    Args:
        kind: the kind of the item: "image", "video" or "audio".
        placeholder: the text that represents the item if the template expects strings.
    """

    def __init__(self, kind: str, placeholder: str) -> None:
        super().__init__(type=kind)
        if kind == "audio":  # Qwen2-Audio's template looks for this key
            self["audio_url"] = ""
        self.placeholder = placeholder


class MessageForm:
    """The form in which one template expects messages.

    Args:
        wants_parts: whether contents are lists of parts instead of strings.
        wraps_strings: whether string contents are converted to lists, too.
        knows_developer: whether the template has a role "developer"; otherwise "system" replaces it.
    """

    def __init__(self, *, wants_parts: bool, wraps_strings: bool, knows_developer: bool) -> None:
        self._wants_parts = wants_parts
        self._wraps_strings = wraps_strings
        self._knows_developer = knows_developer

    def convert(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return copies of the messages in the form that the template expects.

        Raises:
            InvalidRequestError: a message is malformed or has unsupported content.
        """
        return [self._convert(message, f"messages[{place}]") for place, message in enumerate(messages)]

    def _convert(self, message: Message, path: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f'{path} must be an object with a "role"', path)
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(f"{path}.role must be system, developer, user, assistant or tool", f"{path}.role")
        converted = {**message, "content": self._content(message.get("content"), f"{path}.content")}
        if role == "developer" and not self._knows_developer:
            converted["role"] = "system"
        if calls := converted.pop("tool_calls", None):
            converted["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
        _share_reasoning(converted)
        return converted

    def _content(self, content: object, path: str) -> str | list[dict[str, str]]:
        if content is None:
            content = [] if self._wraps_strings else ""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._wraps_strings else content
        if not isinstance(content, Sequence):
            raise InvalidRequestError(f"{path} must be a string or a list of parts", path)
        texts = [
            part.placeholder if isinstance(part, MediaPart) else _part_text(part, part_path(part, f"{path}[{place}]"))
            for place, part in enumerate(content)
        ]
        if not self._wants_parts:
            return "\n".join(texts)
        return [
            dict(part) if isinstance(part, MediaPart) else {"type": "text", "text": text}
            for part, text in zip(content, texts, strict=True)
        ]


def joined_content(parts: Sequence[str | SourcePart]) -> str | list[Any]:
    """Return the content of a message: its texts joined, or a list if it has media."""
    if any(isinstance(part, SourcePart) for part in parts):
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return "\n".join([part for part in parts if isinstance(part, str)])


def part_path(part: object, path: str) -> str:
    """Return the path of a part in the request: `path`, unless the part comes from another API."""
    return part.path if isinstance(part, SourcePart) else path


def _part_text(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f'{path} must be an object with a "type"', path)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        what = _MEDIA_PARTS.get(kind, f"parts of type {kind!r}") if isinstance(kind, str) else f"type {kind!r}"
        raise InvalidRequestError(
            f'{path}.type: {what} are not supported, only text is: {{"type": "text", "text": ...}}', f"{path}.type"
        )
    key = _TEXT_PARTS[kind]
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.{key} must be a string", f"{path}.{key}")
    return text


def _tool_calls(calls: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequestError(f"{path} must be a list", path)
    return [_tool_call(call, f"{path}[{place}]") for place, call in enumerate(calls)]


def _tool_call(call: object, path: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, which templates expect, instead of JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        path = f"{path}.function"
        raise InvalidRequestError(f"{path} must be an object with name and arguments", path)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            path = f"{path}.function.arguments"
            raise InvalidRequestError(f"{path} is not JSON: {error}", path) from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _share_reasoning(message: dict[str, Any]) -> None:
    """Store a message's reasoning under both of its names: clients use one, templates the other."""
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(message.get(name), str):
            message.setdefault(other, message[name])
