"""Messages between a frontend and the process that decodes its audio, over pipes: see `octavo.frontend.media.wire`."""

import msgspec


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
    """Samples per second; 0: `data` is a file."""
    max_windows: int
    """Longer sounds are refused; 0: there is no limit but that of the setup."""


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
