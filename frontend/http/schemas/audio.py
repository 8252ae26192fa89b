"""Bodies of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from typing import Any, Literal

from msgspec import Struct


class DurationUsage(Struct, kw_only=True):
    """What a transcription counts."""

    type: Literal["duration"] = "duration"
    seconds: int
    """Of the file, rounded up."""


class TokenUsage(Struct, kw_only=True):
    """What a stream counts."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    """Of the decoder's prompts, over all windows."""
    output_tokens: int
    total_tokens: int


class TranscriptionLogprob(Struct, kw_only=True):
    """A token that was drawn."""

    token: str
    bytes: list[int]
    logprob: float


class Transcription(Struct, kw_only=True, omit_defaults=True):
    """The text of a file."""

    text: str
    logprobs: list[TranscriptionLogprob] | None = None
    usage: DurationUsage


class TranscriptionSegment(Struct, kw_only=True):
    """A piece of the text, between two timestamps."""

    id: int
    seek: int
    """Where its window begins, in hundredths of a second."""
    start: float
    """Seconds from the beginning of the file."""
    end: float
    text: str
    tokens: list[int]
    """With the timestamps."""
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(Struct, kw_only=True):
    """A word with its punctuation."""

    word: str
    start: float
    """Seconds from the beginning of the file."""
    end: float


class VerboseTranscription(Struct, kw_only=True, omit_defaults=True):
    """The text of a file with its segments or words, or both."""

    task: Literal["transcribe", "translate"]
    language: str
    """Code."""
    duration: float
    text: str
    segments: list[TranscriptionSegment] | None = None
    words: list[TranscriptionWord] | None = None
    usage: DurationUsage


class ChunkDelta(Struct, kw_only=True):
    """New text, as in vLLM's streams."""

    content: str


class ChunkChoice(Struct, kw_only=True, omit_defaults=True):
    """The one choice of a chunk."""

    delta: ChunkDelta
    finish_reason: str | None = None


class TranscriptEvent(Struct, kw_only=True, omit_defaults=True):
    """An event of a stream: OpenAI's, and beside it the fields of vLLM's chunks."""

    type: str
    """"transcript.text.delta" or "transcript.text.done"."""
    delta: str | None = None
    text: str | None = None
    """The whole text, at the end."""
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
"""By name; `file` is apart."""
