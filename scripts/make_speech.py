"""Speaks a text with espeak-ng once and prints the path of the WAV file.

The synthesizer is a shared library inside a package of the Python registry, which is never installed.
"""

import ctypes
import hashlib
import sys
import tempfile
import wave
import zipfile
from pathlib import Path

from fetch_default_model import download_wheel, once

from octavo.protocol.env import Env

REQUIREMENT = "espeakng-loader==0.2.4"
NAME = "espeak-ng-1.52"
_SYNCHRONOUS = 2
_UTF8 = 1
_OK = 0


def speak(text: str) -> Path:
    """Return a WAV file with the text, spoken in English.

    Raises:
        SystemExit: the synthesizer cannot be downloaded, or fails.
    """
    path = Env.read().cache_dir / "speech" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.wav"
    return once(path, lambda path: _write(text, path))


def _write(text: str, path: Path) -> None:
    rate, samples = _synthesize(text, once(path.parent / NAME, _fetch))
    part = path.with_suffix(".part")
    with wave.open(str(part), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples)
    part.rename(path)


def _fetch(path: Path) -> None:
    """Download the synthesizer into a directory."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheel = download_wheel(REQUIREMENT, Path(scratch), f"Put espeak-ng into {path} yourself")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        (Path(scratch) / "espeakng_loader").rename(path)


def _synthesize(text: str, home: Path) -> tuple[int, bytes]:
    """Return the sample rate in Hz, and the 16-bit samples."""
    library = ctypes.CDLL(str(home / "libespeak-ng.so"))
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(home / "espeak-ng-data").encode(), 0)
    if rate <= 0:
        raise SystemExit(f"espeak-ng does not start: {rate}")
    samples = bytearray()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def take(data: "ctypes._Pointer[ctypes.c_short]", count: int, _: int | None) -> int:
        if data and count > 0:
            samples.extend(ctypes.string_at(data, 2 * count))
        return 0

    library.espeak_SetSynthCallback(take)
    encoded = text.encode()
    done = [
        library.espeak_SetVoiceByName(b"en-us"),
        library.espeak_Synth(encoded, ctypes.c_size_t(len(encoded) + 1), 0, 0, 0, _UTF8, None, None),
        library.espeak_Synchronize(),
    ]
    if any(code != _OK for code in done) or not samples:
        raise SystemExit(f"espeak-ng fails: {done}, {len(samples)} bytes")
    return rate, bytes(samples)


if __name__ == "__main__":
    print(speak(" ".join(sys.argv[1:])))
