"""Decodes audio clips that become rows of prompts, and runs the model's processor, in a process that may be killed.

See `octavo.frontend.media.process`, which does the same for images.
"""

from typing import Any

import numpy as np

from octavo.frontend.audio.phi4 import Phi4AudioProcessor
from octavo.frontend.audio.process import FEATURES, AudioDecoder, Samples, num_spare_bytes
from octavo.frontend.audio.voxtral import PLACEHOLDER, windowed_inputs
from octavo.frontend.audio.wire import AudioProcessorJob, AudioProcessorSetup, AudioResult, AudioSetup
from octavo.frontend.media.child import Decoder, serve
from octavo.frontend.media.phi4 import ARCHITECTURE
from octavo.frontend.media.result import result_of
from octavo.frontend.media.wire import Result

MASK = "feature_attention_mask"
_SEEN_FRAMES = 2
"""Number of frames after the end of a clip that affect its last row, through the convolutions of the encoder."""
_WINDOWED_BYTES_PER_SECOND = 700_000
"""Additional bytes of memory per second of audio if all windows are processed together."""


class AudioProcessor:
    """The processor of one model."""

    def __init__(self, setup: AudioProcessorSetup) -> None:
        """Load the processor.

        Raises:
            ImportError: soundfile or soxr is missing.
            OSError, ValueError: the files of the processor are missing or invalid.
        """
        self._decoder = AudioDecoder(AudioSetup(setup.parent, setup.processor_path, setup.max_seconds))
        import transformers

        self._setup, self._window = setup, self._decoder.extractor.n_samples
        self._processor: Any = None
        if setup.rows_per_window:
            self.placeholder, self.placeholder_id = PLACEHOLDER, setup.token_id
            return
        self._processor = transformers.AutoProcessor.from_pretrained(
            setup.processor_path, trust_remote_code=setup.trusts_remote_code, local_files_only=True
        )
        self.placeholder = str(self._processor.audio_token)
        self.placeholder_id = self._processor.tokenizer.convert_tokens_to_ids(self.placeholder)

    def process(self, job: AudioProcessorJob) -> Result:
        """Decode and process an audio clip."""
        samples = self._decoder.decode(job.data, job.rate)
        if isinstance(samples, AudioResult):
            return Result(samples.fault)
        duration_s = len(samples) / self._decoder.rate
        if self._processor is None:
            rows, most = self._setup.rows_per_window, self._setup.max_rows
            num_windows = -(-len(samples) // self._window)
            if (needed := rows * num_windows) > most:  # before the windows are computed
                return Result(f"it has {needed} tokens, and the limit is {most} (--max-model-len)")
            inputs = windowed_inputs(self._decoder.extractor, samples, self._setup.token_id, rows)
            return result_of(inputs, self._setup.token_id, duration_s=duration_s, part_rows=[rows] * num_windows)
        if len(samples) > self._window:
            most_s = self._window / self._decoder.rate
            return Result(f"it is longer than the {most_s:g} seconds that the model reads at once")
        result = result_of(self._inputs(samples), self._setup.token_id, duration_s=duration_s)
        return result if result.num_rows else Result(f"it has {len(samples)} samples, too few for a token")

    def _inputs(self, samples: Samples) -> dict[str, Any]:
        inputs = dict(
            self._processor(
                audio=[samples],
                text=[self.placeholder],
                add_special_tokens=False,
                return_tensors="np",
                return_text_replacement_offsets=True,
                sampling_rate=self._decoder.rate,
            )
        )
        # Drop the silence that fills the window, which the encoder does not read. It is most of the window of a short
        # clip.
        num_seen = 2 * ((int(inputs[MASK].sum()) + 1) // 2) + _SEEN_FRAMES
        for name in (FEATURES, MASK):
            inputs[name] = np.ascontiguousarray(inputs[name][..., :num_seen])
        inputs[MASK] = inputs[MASK].astype(np.int64)
        return inputs


def _load(setup: AudioProcessorSetup) -> Decoder:
    processor = (Phi4AudioProcessor if setup.architecture == ARCHITECTURE else AudioProcessor)(setup)
    num_bytes = num_spare_bytes(setup.max_seconds)
    if setup.rows_per_window:
        num_bytes += int(setup.max_seconds * _WINDOWED_BYTES_PER_SECOND)
    return Decoder(processor.process, num_bytes, processor.placeholder, processor.placeholder_id)


if __name__ == "__main__":
    serve(AudioProcessorSetup, AudioProcessorJob, _load, Result)
