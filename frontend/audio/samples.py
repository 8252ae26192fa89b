"""`samples_of`: converts the audio of callers to the form that decoding processes take."""

from typing import Any

from octavo.frontend.audio.wire import FILE, MAX_RATE, MODEL_RATE
from octavo.frontend.media.download import MediaError

_EXPECTED = (
    "expected the bytes of a file, an array of float samples of one channel at the model's rate, or a pair of such an "
    "array and its whole number of samples per second"
)


def samples_of(value: Any) -> tuple[bytes, int]:
    """Return a file, or float32 samples, and their rate: `FILE`, `MODEL_RATE`, or samples per second.

    Raises:
        MediaError: the value is not audio.
    """
    if isinstance(value, bytes):
        return value, FILE
    samples, rate = value if is_pair(value) else (value, None)
    dtype = str(getattr(samples, "dtype", "")).removeprefix("torch.")
    if len(getattr(samples, "shape", ())) != 1 or not dtype.startswith("float"):
        raise MediaError(f"it is a {type(value).__name__}; {_EXPECTED}")
    if rate is not None and (type(rate) not in (int, float) or not 1 <= rate <= MAX_RATE or int(rate) != rate):
        raise MediaError(f"its sampling rate is {rate!r}; {_EXPECTED}")
    array = samples.numpy(force=True) if hasattr(samples, "numpy") else samples
    return array.astype("float32").tobytes(), MODEL_RATE if rate is None else int(rate)


def is_pair(value: Any) -> bool:
    """Return whether a value is samples with their rate, rather than several audio clips."""
    is_two = isinstance(value, tuple | list) and len(value) == 2
    return is_two and (isinstance(value[1], int | float) or isinstance(value, tuple))
