"""Audio clips of Phi-4-multimodal, whose feature extractor in `transformers` needs torch."""

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.frontend.audio.process import AudioDecoder, Samples
from octavo.frontend.audio.wire import AudioProcessorJob, AudioProcessorSetup, AudioResult, AudioSetup
from octavo.frontend.media.phi4 import with_placeholders
from octavo.frontend.media.result import result_of
from octavo.frontend.media.wire import Result

FEATURES = "audio_input_features"
_FRAMES_AT_ONCE = 128
_LOUDEST = 32768
"""Largest sample value that the filters expect."""


class Phi4AudioProcessor:
    """Replaces the processor of the model; see `octavo.frontend.audio.prompt_process.AudioProcessor`."""

    def __init__(self, setup: AudioProcessorSetup) -> None:
        """Load the feature extractor.

        Raises:
            ImportError: soundfile or soxr is missing.
            OSError, ValueError: the files of the processor are missing or invalid.
        """
        own = AudioSetup(setup.parent, setup.processor_path, setup.max_seconds)
        self._decoder = AudioDecoder(own, "Phi4MultimodalFeatureExtractor")
        import transformers

        self._max_rows, self._bands = setup.max_rows, LogBands(self._decoder.extractor)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            setup.processor_path, trust_remote_code=setup.trusts_remote_code, local_files_only=True
        )
        self.placeholder_id = setup.token_id
        self.placeholder: str = tokenizer.convert_ids_to_tokens(setup.token_id)

    def process(self, job: AudioProcessorJob) -> Result:
        """Decode an audio clip and return its spectrogram."""
        samples = self._decoder.decode(job.data, job.rate)
        if isinstance(samples, AudioResult):
            return Result(samples.fault)
        num_rows = self._bands.num_rows(len(samples))
        if not num_rows:
            return Result(f"it has {len(samples)} samples, too few for a token")
        if num_rows > self._max_rows:
            limits = "--max-num-encoder-tokens and --encoder-cache-tokens limit it"
            return Result(f"it has {num_rows} tokens, and the limit is {self._max_rows} ({limits})")
        tensors = {FEATURES: self._bands(samples)[None]}
        inputs = with_placeholders(tensors, self.placeholder, self.placeholder_id, num_rows)
        return result_of(inputs, self.placeholder_id, duration_s=len(samples) / self._decoder.rate)


class LogBands:
    """Log mel spectrogram of one clip, as `Phi4MultimodalFeatureExtractor` computes it.

    Args:
        extractor: supplies the sizes and filters.

    Raises:
        ValueError: the extractor's rows are not the encoder's rows.
    """

    def __init__(self, extractor: Any) -> None:
        if extractor.audio_downsample_rate != 1 or extractor.audio_feat_stride != 1:
            raise ValueError("preprocessor_config.json: audio_downsample_rate and audio_feat_stride must be 1")
        self._length, self._hop = int(extractor.win_length), int(extractor.hop_length)
        self._size = extractor.n_fft
        self._per_row, self._emphasis = int(extractor.audio_compression_rate), np.float32(extractor.preemphasis)
        self._window = np.hamming(self._length)
        self._filters = extractor.mel_filters.astype(np.float32)

    def num_rows(self, num_samples: int) -> int:
        """Return the number of prompt rows of a clip. 0: the clip is shorter than a frame."""
        num_frames = (num_samples - self._length) // self._hop + 1
        return -(-max(0, num_frames) // self._per_row)

    def __call__(self, samples: Samples) -> npt.NDArray[np.float32]:
        """Return the loudness of all complete frames, shape (frames, bands)."""
        frames = np.lib.stride_tricks.sliding_window_view(samples, self._length)[:: self._hop]
        loudness = np.empty((len(frames), self._filters.shape[1]), dtype=np.float32)
        for first in range(0, len(frames), _FRAMES_AT_ONCE):
            part = frames[first : first + _FRAMES_AT_ONCE]
            before = np.concatenate([part[:, :1], part[:, :-1]], axis=1)
            emphasized = (part - self._emphasis * before) * np.float32(_LOUDEST)
            waves = np.fft.rfft(emphasized * self._window, n=self._size).astype(np.complex64)
            powers = np.abs(waves) ** 2 @ self._filters
            loudness[first : first + len(part)] = np.log(np.maximum(powers, np.float32(1)))
        return loudness
