"""Messages between a frontend and the process that decodes its audio, over pipes; see `octavo.frontend.media.wire`."""

import msgspec

FILE, MODEL_RATE, SILENCE = 0, -1, -2
"""Special rates. `FILE`: the data are a file. `MODEL_RATE`: the model's rate. `SILENCE`: one second of silence, which
is exempt from limits."""

MAX_RATE = 768_000
"""Maximum number of samples per second."""


class AudioSetup(msgspec.Struct, array_like=True):
    """The first message to the process; the reply is `Ready`."""

    parent: int
    processor_path: str
    max_seconds: float
    """Maximum duration of a file."""


class AudioJob(msgspec.Struct, array_like=True):
    """An audio clip; the reply is an `AudioResult`."""

    data: bytes
    """A file, or float32 samples of one channel."""
    rate: int
    """Samples per second; or `FILE` or `MODEL_RATE`."""
    max_windows: int
    """Clips with more windows are rejected. 0: only the limit of the setup applies."""
    is_whole: bool = False
    """Do not cut the clip: its only window has all frames, and at least as many as the model reads at once."""


class Window(msgspec.Struct, array_like=True):
    """A part of an audio clip that the model reads at once."""

    start_s: float
    duration_s: float
    shape: list[int]
    data: bytes
    """The spectrogram: float32, shape `shape`."""
    digest: bytes


class AudioResult(msgspec.Struct, array_like=True):
    """The feature extractor's result for an audio clip."""

    fault: str = ""
    """Why the clip cannot be used, for the caller. Empty if it can."""
    duration_s: float = 0.0
    windows: list[Window] = []


class AudioProcessorSetup(msgspec.Struct, array_like=True):
    """The first message to a process that decodes audio clips to rows of prompts; the reply is `Ready`."""

    parent: int
    processor_path: str
    trusts_remote_code: bool
    token_id: int
    max_seconds: float
    """Maximum duration of a file."""
    rows_per_window: int
    """Number of prompt rows per window, if clips are divided into complete windows. 0: the model's processor
    decides."""
    max_rows: int
    """Maximum number of rows of a clip."""
    architecture: str
    """Architecture of the model."""


class AudioProcessorJob(msgspec.Struct, array_like=True):
    """An audio clip; the reply is a `octavo.frontend.media.wire.Result`."""

    data: bytes
    """A file, or float32 samples of one channel."""
    rate: int
    """Samples per second; or `FILE`, `MODEL_RATE` or `SILENCE`."""
