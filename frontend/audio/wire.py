"""Messages between a frontend and the process that decodes its audio, over pipes: see `octavo.frontend.media.wire`."""

import msgspec

FILE, MODEL_RATE, SILENCE = 0, -1, -2
"""In place of a rate: the data are a file; the rate is the model's; a second of silence, for which no limit holds."""

MAX_RATE = 768_000
"""Samples per second."""


class AudioSetup(msgspec.Struct, array_like=True):
    """The first message to the process; answered by `Ready`."""

    parent: int
    processor_path: str
    max_seconds: float
    """Of a file."""


class AudioJob(msgspec.Struct, array_like=True):
    """A sound; answered by `AudioResult`."""

    data: bytes
    """A file, or float32 samples of one channel."""
    rate: int
    """Samples per second; `FILE`, `MODEL_RATE`."""
    max_windows: int
    """Longer sounds are refused; 0: there is no limit but that of the setup."""
    is_whole: bool = False
    """It is not cut: its only window has all of its frames, and at least those that the model reads at once."""


class Window(msgspec.Struct, array_like=True):
    """A part of a sound that the model reads at once."""

    start_s: float
    duration_s: float
    shape: list[int]
    data: bytes
    """The spectrogram: float32."""
    digest: bytes


class AudioResult(msgspec.Struct, array_like=True):
    """What the feature extractor makes of a sound."""

    fault: str = ""
    """Why it cannot be used, for the caller; "": it can."""
    duration_s: float = 0.0
    windows: list[Window] = []


class SoundSetup(msgspec.Struct, array_like=True):
    """The first message to a process that decodes sounds for rows of prompts; answered by `Ready`."""

    parent: int
    processor_path: str
    trusts_remote_code: bool
    token_id: int
    max_seconds: float
    """Of a file."""
    rows_per_window: int
    """Of the prompt, if the model reads sounds of any length in whole windows; 0: the model's processor tells."""
    max_rows: int
    """Of a sound."""
    architecture: str
    """Of the model."""


class SoundJob(msgspec.Struct, array_like=True):
    """A sound; answered by `octavo.frontend.media.wire.Result`."""

    data: bytes
    """A file, or float32 samples of one channel."""
    rate: int
    """Samples per second; `FILE`, `MODEL_RATE`, `SILENCE`."""
