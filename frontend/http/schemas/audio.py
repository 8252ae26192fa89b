"""Bodies of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from typing import Any, Literal

from msgspec import Struct


class DurationUsage(Struct, kw_only=True):
    """The usage of a transcription."""

    type: Literal["duration"] = "duration"
    seconds: int
    """Duration of the file in seconds, rounded up."""


class TokenUsage(Struct, kw_only=True):
    """The usage of a stream."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    """Tokens of the decoder's prompts, over all windows."""
    output_tokens: int
    total_tokens: int


class TranscriptionLogprob(Struct, kw_only=True):
    """A generated token."""

    token: str
    bytes: list[int]
    logprob: float


class Transcription(Struct, kw_only=True, omit_defaults=True):
    """The transcript of a file."""

    text: str
    logprobs: list[TranscriptionLogprob] | None = None
    usage: DurationUsage


class TranscriptionSegment(Struct, kw_only=True):
    """A part of the text, between two timestamps."""

    id: int
    seek: int
    """Start of the segment's window, in hundredths of a second."""
    start: float
    """Seconds from the beginning of the file."""
    end: float
    text: str
    tokens: list[int]
    """Token ids, including the timestamps."""
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(Struct, kw_only=True):
    """A word, including its punctuation."""

    word: str
    start: float
    """Seconds from the beginning of the file."""
    end: float


class VerboseTranscription(Struct, kw_only=True, omit_defaults=True):
    """The transcript of a file with its segments, its words, or both."""

    task: Literal["transcribe", "translate"]
    language: str
    """Language code."""
    duration: float
    text: str
    segments: list[TranscriptionSegment] | None = None
    words: list[TranscriptionWord] | None = None
    usage: DurationUsage


class ChunkDelta(Struct, kw_only=True):
    """New text, as in vLLM's streams."""

    content: str


class ChunkChoice(Struct, kw_only=True, omit_defaults=True):
    """The only choice of a chunk."""

    delta: ChunkDelta
    finish_reason: str | None = None


class TranscriptEvent(Struct, kw_only=True, omit_defaults=True):
    """An event of a stream: OpenAI's fields together with those of vLLM's chunks."""

    type: str
    """"transcript.text.delta" or "transcript.text.done"."""
    delta: str | None = None
    text: str | None = None
    """The complete text, in the last event."""
    logprobs: list[TranscriptionLogprob] | None = None
    usage: TokenUsage | None = None
    id: str
    object: str
    """"transcription.chunk" or "translation.chunk"."""
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[ChunkChoice]


FORM_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"type": "string"},
    "language": {"type": "string"},
    "prompt": {"type": "string"},
    "response_format": {"type": "string", "enum": ["json", "text", "verbose_json", "srt", "vtt"]},
    "timestamp_granularities[]": {"type": "array", "items": {"type": "string", "enum": ["word", "segment"]}},
    "include[]": {"type": "array", "items": {"type": "string", "enum": ["logprobs"]}},
    "stream": {"type": "boolean"},
    "temperature": {"type": "number"},
    "top_p": {"type": "number"},
    "top_k": {"type": "integer"},
    "min_p": {"type": "number"},
    "seed": {"type": "integer"},
    "frequency_penalty": {"type": "number"},
    "presence_penalty": {"type": "number"},
    "repetition_penalty": {"type": "number"},
    "max_completion_tokens": {"type": "integer"},
}
"""Schemas of the form's fields by name, without `file`."""
