"""`Spectrogram`: computes the input of Whisper's encoder from a window of samples."""

from typing import Any

import numpy as np
import numpy.typing as npt

_FRAMES_AT_ONCE = 128
"""Number of frames whose samples and frequencies fit into the L2 cache."""
_FLOOR = 1e-10
_DYNAMIC_RANGE = 8.0
"""Decades below the loudest band of all frames; quieter bands are raised to this level."""


class Spectrogram:
    """Log mel spectrogram, as `WhisperFeatureExtractor` computes it with a Python loop over frames.

    Args:
        extractor: a `WhisperFeatureExtractor`, which supplies the sizes and filters.

    Raises:
        ValueError: the extractor adds noise, or pads with anything but silence.
    """

    def __init__(self, extractor: Any) -> None:
        if extractor.dither or extractor.padding_value:
            raise ValueError("preprocessor_config.json: dither and padding_value must be 0")
        self._num_samples, self._hop, self._size = extractor.n_samples, extractor.hop_length, extractor.n_fft
        self._window = np.hanning(self._size + 1)[:-1]
        self._filters = np.asarray(extractor.mel_filters, dtype=np.float64)
        """Mel filters, shape (frequencies, bands)."""

    def __call__(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the spectrogram, shape (bands, frames), of a complete window, or of all samples if there are more.

        Args:
            samples: samples of one channel. Fewer samples than a window are padded with silence.
        """
        margin, num_samples = self._size // 2, max(len(samples), self._num_samples)
        padded = np.pad(np.pad(samples, (0, num_samples - len(samples))), margin, mode="reflect")
        num_frames = num_samples // self._hop
        # Frames after the last sample are silent, unless they reach the end of the window, where the samples are
        # mirrored.
        num_heard = num_frames
        if len(samples) <= num_samples - self._size:
            num_heard = min(num_frames, (len(samples) + margin) // self._hop + 1)
        frames = np.lib.stride_tricks.sliding_window_view(padded, self._size)[:: self._hop][:num_heard]
        powers = np.full((num_frames, self._filters.shape[1]), _FLOOR)
        for first in range(0, num_heard, _FRAMES_AT_ONCE):
            waves = np.fft.rfft(frames[first : first + _FRAMES_AT_ONCE] * self._window)
            powers[first : first + len(waves)] = (waves.real**2 + waves.imag**2) @ self._filters
        # In place: a long clip has many frames.
        loudness = np.log10(np.maximum(powers, _FLOOR, out=powers), out=powers)
        np.maximum(loudness, loudness.max() - _DYNAMIC_RANGE, out=loudness)
        loudness += 4.0
        loudness /= 4.0
        return np.ascontiguousarray(loudness.T, dtype=np.float32)
