"""Decodes audio of requests and computes the spectrograms that the model reads, in a process that may be killed.

See `octavo.frontend.media.process`, which does the same for images.
"""

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.frontend.audio.spectrogram import Spectrogram
from octavo.frontend.audio.wire import FILE, MAX_RATE, MODEL_RATE, SILENCE, AudioJob, AudioResult, AudioSetup, Window
from octavo.frontend.media.child import Decoder, serve
from octavo.frontend.media.without_torch import leave_out_torch
from octavo.protocol.buffers import Buffer
from octavo.protocol.media import MediaTensor, digest_of

FEATURES = "input_features"
"""Name of an item's tensor."""
MAX_CHANNELS = 32
BYTES_PER_SECOND = 400_000
"""Maximum bytes of memory that a second of audio takes: samples at 16 kHz, spectrograms, and copies of both."""
SPARE_BYTES = 2**29
_BLOCK_FRAMES = 2**16
_SEARCHED = 0.1
"""Fraction of a window, at its end, in which the quietest place is searched to cut a long clip."""
_QUIET_S = 0.1
"""Length in seconds of the intervals that are compared there."""

Samples = npt.NDArray[np.float32]


class AudioDecoder:
    """Decodes files to samples at the rate of one model's feature extractor."""

    def __init__(self, setup: AudioSetup, extractor: str = "WhisperFeatureExtractor") -> None:
        """Load the feature extractor.

        Args:
            setup: settings of the process.
            extractor: its class in `transformers`.

        Raises:
            ImportError: soundfile or soxr is missing.
            OSError, ValueError: the files of the feature extractor are missing or invalid.
        """
        leave_out_torch()
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
        import transformers

        transformers.logging.set_verbosity_error()
        self._setup = setup
        self.extractor: Any = getattr(transformers, extractor).from_pretrained(
            setup.processor_path, local_files_only=True
        )
        self.rate: int = self.extractor.sampling_rate

    def decode(self, data: bytes, rate: int) -> Samples | AudioResult:
        """Return one channel at the model's rate, or a result with the reason why the audio cannot be used.

        Args:
            data: a file, or float32 samples of one channel.
            rate: samples per second; or `FILE`, `MODEL_RATE` or `SILENCE`.
        """
        if rate == SILENCE:
            return np.zeros(self.rate, dtype=np.float32)
        found = self._of_file(data) if rate == FILE else self._of_samples(data, rate)
        if isinstance(found, AudioResult):
            return found
        if not len(found):
            return AudioResult("it has no samples")
        return found if np.isfinite(found).all() else AudioResult("it has samples that are not finite")

    def _of_samples(self, data: bytes, rate: int) -> Samples | AudioResult:
        rate = self.rate if rate == MODEL_RATE else rate
        whole = np.frombuffer(data, dtype=np.float32)
        return self._too_long(len(whole) / rate) or self._resampled([whole], rate)

    def _of_file(self, data: bytes) -> Samples | AudioResult:
        import soundfile

        try:
            file = soundfile.SoundFile(io.BytesIO(data))
        except soundfile.LibsndfileError as error:
            return AudioResult(f"it is not audio in a format of libsndfile, such as WAV, FLAC, Ogg and MP3: {error}")
        with file:
            if not 0 < file.samplerate <= MAX_RATE or not 0 < file.channels <= MAX_CHANNELS:
                return AudioResult(f"it has {file.channels} channels with {file.samplerate} samples per second")
            if too_long := self._too_long(max(0, file.frames) / file.samplerate):
                return too_long
            blocks, num_frames = [], 0
            while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
                num_frames += len(block)
                if too_long := self._too_long(num_frames / file.samplerate):  # the header may be wrong
                    return too_long
                blocks.append(block.mean(axis=1, dtype=np.float32))
            return self._resampled(blocks, file.samplerate)

    def _too_long(self, seconds: float) -> AudioResult | None:
        if seconds <= self._setup.max_seconds:
            return None
        return AudioResult(
            f"it is {seconds:.0f} seconds long, more than {self._setup.max_seconds:g} (--max-audio-seconds)"
        )

    def _resampled(self, blocks: list[Samples], rate: int) -> Samples:
        import soxr

        if rate == self.rate:
            return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)
        stream = soxr.ResampleStream(rate, self.rate, 1, dtype="float32")
        parts = [stream.resample_chunk(block) for block in blocks]
        parts.append(stream.resample_chunk(np.zeros(0, dtype=np.float32), last=True))
        return np.concatenate(parts)


class AudioReader:
    """Makes spectrograms of the windows of audio clips, for one model.

    Args:
        decoder: decoder of the model.

    Raises:
        ValueError: see `Spectrogram`.
    """

    def __init__(self, decoder: AudioDecoder) -> None:
        self._decoder, self._spectrogram = decoder, Spectrogram(decoder.extractor)
        self._rate, self._window = decoder.rate, decoder.extractor.n_samples

    def read(self, job: AudioJob) -> AudioResult:
        """Decode an audio clip and return its windows."""
        samples = self._decoder.decode(job.data, job.rate)
        if isinstance(samples, AudioResult):
            return samples
        bounds = [(0, len(samples))] if job.is_whole else self._cut(samples)
        if job.max_windows and len(bounds) > job.max_windows:
            most_s = job.max_windows * self._window / self._rate
            return AudioResult(f"it is longer than the {most_s:g} seconds that the model reads at once")
        windows = [self._features(samples, start, end) for start, end in bounds]
        return AudioResult(duration_s=len(samples) / self._rate, windows=windows)

    def _cut(self, samples: Samples) -> list[tuple[int, int]]:
        """Return the start and end samples of windows; a long clip is cut where it is quiet."""
        bounds, start = [], 0
        size = max(1, int(_QUIET_S * self._rate))
        while len(samples) - start > self._window:
            end = start + self._window
            first = end - int(_SEARCHED * self._window)
            energies = np.convolve(samples[first:end].astype(np.float64) ** 2, np.ones(size), mode="valid")
            cut = first + int(energies.argmin()) + size // 2
            bounds.append((start, cut))
            start = cut
        return [*bounds, (start, len(samples))]

    def _features(self, samples: Samples, start: int, end: int) -> Window:
        features = self._spectrogram(samples[start:end])
        shape, data = list(features.shape), features.tobytes()
        digest = digest_of({FEATURES: MediaTensor("float32", shape, Buffer(data))})
        return Window(start / self._rate, (end - start) / self._rate, shape, data, digest)


def num_spare_bytes(max_seconds: float) -> int:
    """Return the bytes of memory that decoding a clip may take, in addition to what the process has loaded."""
    return int(max_seconds * BYTES_PER_SECOND) + SPARE_BYTES


def _load(setup: AudioSetup) -> Decoder:
    return Decoder(AudioReader(AudioDecoder(setup)).read, num_spare_bytes(setup.max_seconds))


if __name__ == "__main__":
    serve(AudioSetup, AudioJob, _load, AudioResult)
