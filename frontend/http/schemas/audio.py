"""Bodies of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from typing import Any, Literal

from msgspec import Struct


class DurationUsage(Struct, kw_only=True):
    """What a transcription counts."""

    type: Literal["duration"] = "duration"
    seconds: int
    """Of the file, rounded up."""


class Transcription(Struct, kw_only=True):
    """The text of a file."""

    text: str
    usage: DurationUsage


FORM_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"type": "string"},
    "language": {"type": "string"},
    "prompt": {"type": "string"},
    "response_format": {"type": "string", "enum": ["json", "text"]},
    "temperature": {"type": "number"},
    "top_p": {"type": "number"},
    "top_k": {"type": "integer"},
    "min_p": {"type": "number"},
    "seed": {"type": "integer"},
    "frequency_penalty": {"type": "number"},
    "presence_penalty": {"type": "number"},
    "repetition_penalty": {"type": "number"},
    "max_completion_tokens": {"type": "integer"},
    "stream": {"type": "boolean", "enum": [False]},
}
"""By name; `file` is apart."""
